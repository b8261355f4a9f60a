"""Words of code, split and shortened by hand."""

from __future__ import annotations

import pytest

from envs.shadow.words import stem, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parseFiles", "pars fil parsefiles"),
        ("parse_file", "pars fil parse_file"),
        ("HTTPServer2", "http server 2 httpserver2"),
        ("getJSON()", "get json getjson"),
        ("__init__", "init"),
        ("MAX_SIZE = 10;", "max siz max_size 10"),
        ("a.b-c", "a b c"),
        ("naïve Größe", "naïve größe"),
        ("漢字", "漢字"),
        ("", ""),
        ("_ __ . 5x", "5 x 5x"),
        ("where are files parsed?", "wher are fil pars"),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert " ".join(words(text)) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("parse", "parsing"),
        ("parse", "parsed"),
        ("run", "running"),
        ("process", "processing"),
        ("process", "processes"),
        ("query", "queries"),
        ("file", "files"),
        ("box", "boxes"),
        ("cache", "caches"),
        ("match", "matched"),
        ("call", "called"),
    ],
)
def test_forms_of_a_word_meet(one: str, other: str) -> None:
    assert stem(one) == stem(other)


@pytest.mark.parametrize("word", ["string", "bus", "status", "class", "use", "red", "this", "sing", "größe"])
def test_words_that_only_look_like_a_form_stay(word: str) -> None:
    assert stem(word) == word


def test_a_word_without_an_end_is_cut() -> None:
    assert list(words("x" * 1000)) == ["x" * 64]
