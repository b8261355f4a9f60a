"""Names and values that MLflow takes. MLflow's own validators are the judge."""

from __future__ import annotations

import enum
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from composer.tracking.names import (
    Names,
    anchored_uri,
    chunks,
    clean_name,
    finite_or_nan,
    flatten,
    numbers,
    redact,
    shorten,
    sqlite_path,
    sqlite_uri,
    value_text,
)


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("mean@1", "mean_at_1"),
        ("timing(s)/gen", "timing_s/gen"),
        ("reward/mean", "reward/mean"),
        ("hit rate 50%", "hit rate 50_percent"),
        ("/absolute//path/../x/", "absolute/path/x"),
        ("Δlogp", "logp"),
        ("", "unnamed"),
        ("???", "unnamed"),
        ("loss\n", "loss"),
    ],
)
def test_a_name_keeps_what_it_may(name: str, cleaned: str) -> None:
    assert clean_name(name) == cleaned


@settings(deadline=None)  # the first example imports MLflow
@given(st.text(max_size=400))
def test_mlflow_accepts_every_cleaned_name(name: str) -> None:
    from mlflow.utils.validation import _validate_metric, _validate_param

    cleaned = clean_name(name)
    _validate_metric(cleaned, 1.0, 0, 0)
    _validate_param(cleaned, "value")
    assert clean_name(cleaned) == cleaned


def test_long_names_stay_apart() -> None:
    first, second = clean_name("a" * 300), clean_name("a" * 301)
    assert len(first) == len(second) == 250
    assert first != second


def test_two_names_never_become_one() -> None:
    names = Names()
    cleaned = [names(name) for name in ("a@b", "a_at_b", "a@b", "a(b", "a[b")]
    assert cleaned[0] == cleaned[2] == "a_at_b"
    assert len(set(cleaned)) == 4


def test_flatten_numbers_lists_of_mappings_only() -> None:
    config = {"a": {"b": 1, "c": {}}, "l": [1, 2], "m": [{"x": 1}, {"x": 2}], "n": None}
    assert flatten(config) == {"a.b": 1, "l": [1, 2], "m.0.x": 1, "m.1.x": 2, "n": None}


class Colour(enum.StrEnum):
    red = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (3e-4, "0.0003"),
        (Colour.red, "red"),
        ([Colour.red, 1], '["red", 1]'),
        ("null", "null"),
        ("postgresql://me:secret@db:5432/runs", "postgresql://me:***@db:5432/runs"),
    ],
)
def test_values_are_spelt_as_in_yaml(value: object, text: str) -> None:
    assert value_text(value) == text


def test_numbers_leaves_out_what_is_none() -> None:
    assert numbers({"a": {"b": 1, "c": "x", "d": None, "e": True}, "f": 0.5}) == {"a/b": 1.0, "f": 0.5}


def test_shorten_says_how_long_it_was() -> None:
    assert shorten("x" * 50, 50) == "x" * 50
    assert shorten("x" * 51, 50).endswith("... [51 characters]")


def test_infinity_becomes_nan() -> None:
    assert finite_or_nan(1.5) == 1.5
    assert math.isnan(finite_or_nan(math.inf)) and math.isnan(finite_or_nan(math.nan))


def test_chunks_by_number_and_by_bytes() -> None:
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunks([40, 40, 40, 200, 10], 100, lambda n: n, 100)) == [[40, 40], [40], [200], [10]]
    assert list(chunks([], 2)) == []


@pytest.mark.parametrize("text", ["http://host:5000", "sqlite:////a/b.db", "user@host", "plain", "x://[bad@"])
def test_texts_without_a_password_are_kept(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "name", ["plain", "%d2", "a%25b", "what?", "a?timeout=1", "a#b", "a b", "me:you@host", "hü;&+"]
)
def test_an_sqlite_uri_names_its_file(name: str) -> None:
    """As SQLAlchemy reads it, which MLflow asks."""
    for path in (Path("/runs", name, "mlflow.db"), Path(name, "mlflow.db")):
        uri = sqlite_uri(path)
        assert make_url(uri).database == str(path)
        assert dict(make_url(uri).query) == {}
        assert sqlite_path(uri) == path
        assert sqlite_path(anchored_uri(uri, Path("/100%"))) == Path("/100%") / path


@pytest.mark.parametrize(
    "uri", ["http://host/a", "postgresql://host/a.db", "sqlite://", "sqlite:////a%3F/b.db?timeout=3"]
)
def test_what_needs_no_anchor(uri: str) -> None:
    assert anchored_uri(uri, Path("/base")) == uri


def test_parameters_of_a_database_stay() -> None:
    assert anchored_uri("sqlite+pysqlite:///a%25/b.db?timeout=3", Path("/c?")) == (
        "sqlite+pysqlite:////c%3F/a%25/b.db?timeout=3"
    )
    assert sqlite_path("sqlite:////a/b.db?timeout=3") == Path("/a/b.db")
