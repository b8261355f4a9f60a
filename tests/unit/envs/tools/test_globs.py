"""Globs against paths, by Python's `re`; test_tools_files.py gives the same expressions to `find`."""

from __future__ import annotations

import re

import pytest

from envs.tools.globs import glob_to_regex


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("*.py", ["a.py", "x/y/a.py", ".py"], ["a.pyi", "a.py/b", "apy"]),
        ("./*.py", ["a.py", "x/a.py"], ["a.pyc"]),
        ("src/*.py", ["src/a.py"], ["src/x/a.py", "a.py", "x/src/a.py"]),
        ("/src/*.py", ["src/a.py"], ["/src/a.py"]),
        ("src/**/*.py", ["src/a.py", "src/x/y/a.py"], ["srcx/a.py", "src/a.c"]),
        ("**/test_?.go", ["test_1.go", "a/b/test_x.go"], ["test_10.go", "test_/.go"]),
        ("src/**", ["src/a", "src/x/y"], ["src", "x/src/a"]),
        ("**", ["a", "a/b"], []),
        ("a**b", ["ab", "axb"], ["ax"]),
        ("*.{py,pyi}", ["a.py", "x/a.pyi"], ["a.pyc", "a.{py,pyi}"]),
        ("{a,b{c,d}}.x", ["a.x", "bc.x", "bd.x"], ["b.x", "bcd.x"]),
        ("{src,lib/**}/*.c", ["src/a.c", "lib/x/a.c"], ["lib/a.h"]),
        ("[ab].c", ["a.c", "x/b.c"], ["c.c", "[ab].c"]),
        ("[!a-c]1", ["d1"], ["a1", "b1", "/1"]),
        ("[]]x", ["]x"], ["x"]),
        ("a[b", ["a[b"], ["ab"]),
        ("a{b,c", ["a{b,c"], ["ab"]),
        ("a}b,c", ["a}b,c"], ["ab"]),
        ("a+(b).$^|\\c", ["a+(b).$^|\\c"], ["aa(b)x$^|c"]),
        ("naïve*", ["naïve.txt"], ["naive.txt"]),
    ],
)
def test_what_a_glob_fits(pattern: str, fits: list[str], does_not: list[str]) -> None:
    regex = re.compile(glob_to_regex(pattern))
    assert [path for path in fits if not regex.fullmatch(path)] == []
    assert [path for path in does_not if regex.fullmatch(path)] == []
