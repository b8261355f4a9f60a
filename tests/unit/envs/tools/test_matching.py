"""Where old texts stand, worked out by hand."""

from __future__ import annotations

import time

from envs.tools.matching import Match, apply, exact_matches, line_number, loose_matches, nearest_line

CODE = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n"


def test_exact_matches_are_counted_where_they_overlap_and_replaced_where_they_do_not() -> None:
    assert exact_matches("aaaa", "aa", "b", most=10) == [Match(0, 2, "b"), Match(1, 3, "b"), Match(2, 4, "b")]
    assert exact_matches("aaaa", "aa", "b", most=2) == [Match(0, 2, "b"), Match(1, 3, "b")]
    assert exact_matches("aaaaa", "aa", "b") == [Match(0, 2, "b"), Match(2, 4, "b")]
    assert exact_matches("abc", "x", "b") == []
    assert apply("aaaaa", exact_matches("aaaaa", "aa", "b")) == "bba"
    assert apply("abc", []) == "abc"


def test_loose_matches_move_the_new_text_to_the_place() -> None:
    old, new = "def f(self):\n    return 1", "def f(self):\n    # two\n\n    return 2"
    (match,) = loose_matches(CODE, old, new)
    assert CODE[match.start : match.end] == "    def f(self):\n        return 1"
    assert match.replacement == "    def f(self):\n        # two\n\n        return 2"
    assert apply(CODE, [match]) == CODE.replace(
        "f(self):\n        return 1", "f(self):\n        # two\n\n        return 2"
    )


def test_loose_matches_ignore_white_space_at_the_ends_of_lines() -> None:
    assert apply("a = 1  \nb = 2\n", loose_matches("a = 1  \nb = 2\n", "a = 1\nb = 2\t", "c = 3")) == "c = 3\n"
    assert apply("\tx\n", loose_matches("\tx\n", "    x", "    y")) == "\ty\n"
    # An empty line around the old text, and the same one around the new.
    assert apply("a\nb\n", loose_matches("a\nb\n", "\nb\n", "\nc\n")) == "a\nc\n"
    assert apply("a\nb", loose_matches("a\nb", "  b", "  c")) == "a\nc"


def test_loose_matches_keep_the_shape_of_a_block() -> None:
    # The same words with another indentation inside the block are another program.
    assert loose_matches("if a:\n    b()\nc()\n", "if a:\n    b()\n    c()", "") == []
    assert loose_matches("if a:\n    b()\n", "if a:\nb()", "") == []
    # Whole lines only, and something must stand in them.
    assert loose_matches("foobar\n", "foo", "x") == []
    assert loose_matches("a\n\nb\n", " \n ", "x") == []


def test_loose_matches_that_are_not_unique_are_all_found() -> None:
    assert len(loose_matches(CODE, "return 1", "return 2", most=10)) == 2
    assert len(loose_matches(CODE, "return 1", "return 2", most=1)) == 1
    text = "a\na\na\n"
    assert [m.start for m in loose_matches(text, " a\n a", "b", most=10)] == [0, 2]
    assert [m.start for m in loose_matches(text, " a\n a", "b")] == [0]


def test_a_new_line_left_of_the_old_text_begins_at_the_place() -> None:
    text = "  if a:\n    b\n"
    assert apply(text, loose_matches(text, "    if a:\n      b", "    if c:\n d")) == "  if c:\n  d\n"


def test_the_nearest_line() -> None:
    assert nearest_line(CODE, "\n  def g(self) :\n    pass") == (5, "    def g(self):")
    assert nearest_line(CODE, "return 1") == (3, "        return 1")
    assert nearest_line(CODE, "import numpy") is None
    assert nearest_line("", "x") is None
    assert nearest_line("x" * 1000, "\n \n") is None


def test_the_number_of_a_line() -> None:
    assert [line_number("a\nb\nc", position) for position in (0, 1, 2, 4)] == [1, 1, 2, 3]


def test_a_megabyte_that_repeats_itself_takes_no_minutes() -> None:
    text = "a\n" * 2**18
    start = time.monotonic()
    assert len(exact_matches(text, "a\n" * 1000, "b", most=100)) == 100
    assert exact_matches(text, "a\n" * 1000 + "b", "b", most=100) == []
    assert loose_matches(text, "a\n" * 50 + "b", "b", most=100) == []
    assert nearest_line("ab" * 2**19, "ba" * 1000) is not None
    assert time.monotonic() - start < 20
