"""Strict binding: what fits, what does not, and what the message tells the user to type instead."""

import contextlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.binding import MISSING, accepts, bind, check_value, leaf_keys, suggest
from composer.errors import ConfigError
from composer.schema import Config, number


class Colour(StrEnum):
    red = "red"
    green = "green"


@dataclass(frozen=True)
class Leaf:
    size: int = number(MISSING, 1, 8)
    rate: float = number(0.5, above=0)
    on: bool = False
    colour: Colour = Colour.red
    note: str | None = None


@dataclass(frozen=True)
class Root:
    leaf: Leaf = MISSING  # pyright: ignore[reportAssignmentType]
    leaves: dict[str, Leaf] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)


def error_of(data: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        bind(Root, data)
    return caught.value


def test_plain_data_becomes_frozen_dataclasses() -> None:
    root = bind(
        Root,
        {
            "leaf": {"size": 3, "rate": 1, "colour": "green", "note": "x"},
            "leaves": {"a": {"size": 1}},
            "names": ["n"],
            "free": {"anything": [1, {"b": None}]},
        },
    )
    assert root == Root(
        leaf=Leaf(size=3, rate=1.0, colour=Colour.green, note="x"),
        leaves={"a": Leaf(size=1)},
        names=["n"],
        free={"anything": [1, {"b": None}]},
    )
    assert isinstance(root.leaf.rate, float)
    with pytest.raises(AttributeError):
        root.leaf.size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "key", "value", "remedy"),
    [
        ({"leaf": {"size": 3, "sise": 4}}, "leaf.sise", 4, "did you mean `leaf.size`?"),
        ({"leaf": {"size": 3}, "rate": 4}, "rate", 4, "did you mean `leaf.rate`?"),
        ({"leaf": {"size": 3}, "qqq": 4}, "qqq", 4, "the keys here are leaf, leaves, names, free"),
        ({"leaf": {"size": 0}}, "leaf.size", 0, "at least 1 and at most 8"),
        ({"leaf": {"size": 9}}, "leaf.size", 9, "at most 8"),
        ({"leaf": {"size": -3}}, "leaf.size", -3, "at least 1"),
        ({"leaf": {"size": 1, "rate": 0}}, "leaf.rate", 0.0, "greater than 0"),
        ({"leaf": {"size": 1, "rate": float("inf")}}, "leaf.rate", float("inf"), "finite"),
        ({"leaf": {"size": True}}, "leaf.size", True, "a whole number is expected: write 1"),
        ({"leaf": {"size": 2.0}}, "leaf.size", 2.0, "write 2"),
        ({"leaf": {"size": "2"}}, "leaf.size", "2", "write 2, without quotes"),
        ({"leaf": {"size": "010"}}, "leaf.size", "010", "write 10, without leading zeros"),
        ({"leaf": {"size": "8k"}}, "leaf.size", "8k", "write 8000"),
        ({"leaf": {"size": "8KiB"}}, "leaf.size", "8KiB", "write 8192"),
        ({"leaf": {"size": "abc"}}, "leaf.size", "abc", "a whole number is expected"),
        ({"leaf": {"size": 1, "rate": "1e-4"}}, "leaf.rate", "1e-4", "write 0.0001, without quotes"),
        ({"leaf": {"size": 1, "on": "yes"}}, "leaf.on", "yes", "true or false is expected: write true"),
        ({"leaf": {"size": 1, "on": 1}}, "leaf.on", 1, "true or false is expected"),
        (
            {"leaf": {"size": 1, "colour": "gren"}},
            "leaf.colour",
            "gren",
            "not one of red, green; did you mean `green`?",
        ),
        ({"leaf": {"size": 1, "colour": False}}, "leaf.colour", False, "YAML reads on, off, yes and no as false"),
        ({"leaf": {"size": 1, "note": True}}, "leaf.note", True, "YAML reads on, off, yes and no as true"),
        ({"leaf": {"size": 1, "note": 7}}, "leaf.note", 7, "quote it, '7'"),
        ({"leaf": {"size": None}}, "leaf.size", None, "null is not allowed"),
        ({"leaf": {"size": MISSING}}, "leaf.size", MISSING, "give `leaf.size=<a whole number>`"),
        ({"leaf": {}}, "leaf.size", MISSING, "give `leaf.size=<a whole number>`"),
        ({}, "leaf", MISSING, "has no value yet"),
        ({"leaf": 3}, "leaf", 3, "expected a group of keys (size, rate"),
        ({"leaf": {"size": 1}, "names": "n"}, "names", "n", "write `names=[n]`"),
        ({"leaf": {"size": 1}, "names": [1]}, "names[0]", 1, "a text is expected"),
        ({"leaf": {"size": 1}, "leaves": {"a": {"size": -1}}}, "leaves.a.size", -1, "at least 1"),
        ({"leaf": {"size": 1}, "leaves": {2: {"size": 1}}}, "leaves.2", 2, "quote it, '2'"),
        ({"leaf": {"size": 1}, "leaf.size": 2}, "leaf.size", 2, "nest it, `leaf: size`"),
        ({"leaf": {"size": 1}, "default": []}, "default", [], "did you mean `defaults`?"),
        ({"leaf": {"size": 1}, "experiment": {}}, "experiment", {}, "# @package _global_"),
    ],
)
def test_what_does_not_fit_says_key_value_and_remedy(data: Any, key: str, value: Any, remedy: str) -> None:
    error = error_of(data)
    assert (error.key, error.value) == (key, value)
    assert remedy in str(error)
    assert "\n" not in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize("size", [1.5, "1.5"])
def test_no_number_is_made_up_where_two_are_as_near(size: Any) -> None:
    assert error_of({"leaf": {"size": size}}).remedy == "a whole number is expected"


def test_an_incomplete_entry_with_a_similar_name_was_a_misspelling() -> None:
    data = {"leaf": {"size": 1}, "leaves": {"first": {"size": 1}, "frist": {"rate": 2.0}}}
    assert "did you mean `leaves.first.rate`?" in str(error_of(data))


def test_the_place_of_a_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\(in a.yaml, line 3\)"):
        bind(Root, {"leaf": {"size": 0}}, origin=lambda key: " (in a.yaml, line 3)" if key == "leaf.size" else "")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lr", "learning_rate"), ("tp", "tensor_parallel"), ("gruop_size", "group_size"), ("zzz", None)],
)
def test_suggestions(typed: str, meant: str | None) -> None:
    assert suggest(typed, ["learning_rate", "tensor_parallel", "group_size"]) == meant


def test_keys_of_the_schema() -> None:
    keys = list(leaf_keys(Config))
    assert {"seed", "algorithm.group_size", "mix.phases.<name>.tokens", "env.taskset._target_"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert accepts(Config, "algorithm.group_size") == (True, False)
    assert accepts(Config, "mix.phases.sft.tokens") == (True, True)
    assert accepts(Config, "env.taskset.args.anything.below") == (True, True)
    assert accepts(Config, "algorithm.gruop_size") == (False, False)


def test_check_value_takes_an_int_for_a_float() -> None:
    assert check_value(float, 3, "k") == 3.0
    assert check_value(int | None, None, "k") is None
    with pytest.raises(ConfigError):
        check_value(list[int], [1, "a"], "k")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=12,
    )
)
def test_no_data_whatever_raises_anything_but_a_config_error(data: Any) -> None:
    for value in (data, {"leaf": data}, {"leaf": {"size": data}}, {"leaf": {"size": 1}, "leaves": {"a": data}}):
        with contextlib.suppress(ConfigError):
            bind(Root, value)
