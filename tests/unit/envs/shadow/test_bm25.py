"""Scores worked out by hand from the formula in bm25.py, with k1 = 1.2 and b = 0.75."""

from __future__ import annotations

import random

import pytest

from envs.shadow.bm25 import Bm25


def index() -> Bm25[str]:
    made: Bm25[str] = Bm25()
    made.add("a", ["x", "x", "y"])
    made.add("b", ["x", "z"])
    made.add("c", ["y"])
    return made


def test_scores() -> None:
    # Three documents of 3, 2 and 1 words: 2 on average. x and y are in two of them: idf = ln(1 + 1.5 / 2.5) = ln 1.6.
    #   a: 2 x's, 1 - b + b * 3 / 2 = 1.375:  0.470004 * 2 * 2.2 / (2 + 1.65) = 0.566580
    #   b: 1 x, of average length:            0.470004 * 2.2 / 2.2            = 0.470004
    found = index().search(["x"], 10)
    assert [key for key, _ in found] == ["a", "b"]
    assert [score for _, score in found] == pytest.approx([0.566580, 0.470004], abs=1e-6)
    #   y: a 0.470004 * 2.2 / (1 + 1.65) = 0.390192, c 0.470004 * 2.2 / (1 + 0.75) = 0.590862
    found = index().search(["x", "y"], 10)
    assert [key for key, _ in found] == ["a", "c", "b"]
    assert [score for _, score in found] == pytest.approx([0.956772, 0.590862, 0.470004], abs=1e-6)
    # z is in one: ln(1 + 2.5 / 1.5) = 0.980829.
    assert index().search(["z"], 10) == [("b", pytest.approx(0.980829, abs=1e-6))]


def test_a_query_that_repeats_itself_asks_once() -> None:
    assert index().search(["x", "x"], 10) == index().search(["x"], 10)
    assert index().search([], 10) == [] == index().search(["unknown"], 10)
    assert Bm25().search(["x"], 10) == []


def test_documents_come_and_go() -> None:
    made = index()
    made.remove("c")
    made.remove("nowhere")
    # Two documents, 2.5 words on average: idf = ln(1 + 0.5 / 2.5) = 0.182322.
    #   a: 0.182322 * 4.4 / (2 + 1.38) = 0.237342, b: 0.182322 * 2.2 / (1 + 1.02) = 0.198568
    assert [score for _, score in made.search(["x"], 10)] == pytest.approx([0.237342, 0.198568], abs=1e-6)
    assert [key for key, _ in made.search(["y"], 10)] == ["a"]
    made.add("a", ["z"])
    assert [key for key, _ in made.search(["x"], 10)] == ["b"]
    assert made.search(["y"], 10) == [] and made.idf("y") == 0.0
    assert len(made) == 2


def test_an_index_that_changed_is_as_one_made_anew() -> None:
    numbers = random.Random(0)
    changed: Bm25[int] = Bm25()
    documents: dict[int, list[str]] = {}
    for _ in range(300):
        key = numbers.randrange(30)
        if numbers.random() < 0.3:
            changed.remove(key)
            documents.pop(key, None)
        else:
            documents.pop(key, None)
            documents[key] = numbers.choices("abcdefgh", k=numbers.randrange(1, 9))
            changed.add(key, documents[key])
    anew: Bm25[int] = Bm25()
    for key, content in documents.items():
        anew.add(key, content)
    for query in ("a", "bc", "defgh"):
        assert changed.search(query, 50) == anew.search(query, 50)


def test_of_equals_the_one_that_came_first_is_first() -> None:
    made: Bm25[int] = Bm25()
    for key in (5, 3, 9, 1):
        made.add(key, ["x"])
    assert [key for key, _ in made.search(["x"], 3)] == [5, 3, 9]
