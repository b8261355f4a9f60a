"""Faults as single edits: each kind by hand, and nothing beside them changes."""

from __future__ import annotations

import ast

import pytest

from envs.tasks.mutations import KINDS, mutations
from envs.tasks.python_source import PythonSource, is_library_file, is_test_file


def mutated(code: str, kind: str) -> list[str]:
    source = PythonSource(code.encode())
    [function] = [d.node for d in source.definitions() if isinstance(d.node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [source.edited(m.edit).decode() for m in mutations(source, function) if m.kind == kind]


def body(statement: str) -> str:
    return f"def f(a, b, c):\n    {statement}\n"


@pytest.mark.parametrize(
    ("kind", "statement", "expected"),
    [
        ("operator", "return a + b", ["return a - b"]),
        ("operator", "return a ** b // c", ["return a * b // c", "return a ** b % c"]),
        ("operator", "return (a) - (  # less\n        b)", ["return (a) + (  # less\n        b)"]),
        ("operator", "return 'x' + a", []),
        ("operator", "return f'{a + b}'", []),
        ("operator", "a -= b", ["a += b"]),
        ("operator", "a = b and c or a", ["a = b or c or a", "a = b and c and a"]),
        ("operator", "return a and b and c", ["return a or b and c"]),
        ("operator", "é = a; return 'é', a * b", ["é = a; return 'é', a // b"]),
        ("comparison", "return a < b", ["return a <= b"]),
        ("comparison", "return a >= b != c", ["return a > b != c", "return a >= b == c"]),
        ("comparison", "return a not  in b", ["return a in b"]),
        ("comparison", "return a is b", ["return a is not b"]),
        ("condition", "if a:\n        c = b", ["if not (a):\n        c = b"]),
        ("condition", "if not a:\n        c = b", ["if a:\n        c = b"]),
        ("condition", "if not (a or b):\n        c = b", ["if (a or b):\n        c = b"]),
        ("condition", "return a if b else c", ["return a if not (b) else c"]),
        ("condition", "while True:\n        break", []),
        ("arguments", "return max(a, key=b)", []),
        ("arguments", "return max( a,b , c)", ["return max( b,a , c)", "return max( a,c , b)"]),
        ("arguments", "return max(a, a)", []),
        ("arguments", "return max(*a, b)", []),
        ("return", "return a", ["a"]),
        ("return", "return  (a,\n            b)", ["(a,\n            b)"]),
        ("return", "return None", []),
        ("constant", "return a[0] or True", ["return a[1] or True", "return a[0] or False"]),
        ("constant", "b: list[1] = 0.5", ["b: list[1] = 1.5"]),
        ("constant", "return 'text'", []),
        ("statement", "a.append(b)", ["pass"]),
        ("statement", "a[b] = c", ["pass"]),
        ("statement", "a = b", []),
        ("statement", "raise ValueError(\n        a)", ["pass"]),
        ("statement", '"""Says what."""', []),
    ],
)
def test_each_kind(kind, statement, expected):
    assert mutated(body(statement), kind) == [body(e) for e in expected]


SHOP = b'''"""A shop."""

import math  # for later


class Shop:
    """Sells."""

    @property
    def total( self ):   # odd   spaces
        """1 + 1 < 3."""
        total = 0
        for price, count in self.items:
            if count > 10 and price: total += price * count - 1
            else:
                total += price*count
        return   math.floor( total )  # down


OTHER = 1 + 1
'''


def test_all_that_is_not_the_fault_stays_as_it_was():
    source = PythonSource(SHOP)
    [total] = [d for d in source.definitions() if d.name == "Shop.total"]
    found = mutations(source, total.node)
    assert {m.kind for m in found} == set(KINDS) - {"arguments"}
    for m in found:
        content = source.edited(m.edit)
        assert content[: m.edit.start] == SHOP[: m.edit.start]
        assert content[m.edit.start + len(m.edit.text) :] == SHOP[m.edit.end :]
        assert ast.dump(ast.parse(content)) != ast.dump(source.tree)
        assert 12 <= m.line <= 17
    assert len({source.edited(m.edit) for m in found}) == len(found)
    assert len({(m.kind, m.number) for m in found}) == len(found)
    assert [m.edit.start for m in found] == sorted(m.edit.start for m in found)


def test_a_few_of_them_are_the_first_of_a_ranking():
    source = PythonSource(SHOP)
    [total] = [d.node for d in source.definitions() if d.name == "Shop.total"]
    found = mutations(source, total)
    backwards = mutations(source, total, rank=lambda m: f"{-m.edit.start + 10**6:08}")
    assert sorted(backwards, key=found.index) == found and backwards[0].edit.start == found[-1].edit.start
    assert mutations(source, total, most=3) == found[:3]
    assert mutations(source, total, ["return"], most=3) == [m for m in found if m.kind == "return"]


def test_carriage_returns_do_not_shift_positions():
    source = PythonSource(b"x = 'a\xc3\xa9'\r\n\r\ndef f(a):\r\n    return a + 1\r\n")
    [m] = [m for m in mutations(source, source.tree.body[1]) if m.kind == "operator"]
    assert source.edited(m.edit) == b"x = 'a\xc3\xa9'\r\n\r\ndef f(a):\r\n    return a - 1\r\n"


def test_definitions_have_their_classes_names_and_inner_functions_are_none():
    code = "def a():\n    def inner(): pass\n"
    code += "class B:\n    class C:\n        def _d(self): pass\n    async def e(self): pass\n"
    found = list(PythonSource(code.encode()).definitions())
    assert [(d.name, d.top) for d in found] == [("a", "a"), ("B", "B"), ("B.C", "B"), ("B.C._d", "B"), ("B.e", "B")]
    assert [d.is_public for d in found] == [True, True, True, False, True]


@pytest.mark.parametrize("content", [b"def f(:", b"\xff", b"\xef\xbb\xbfx = 1\n", b"\0", b"x = 1\ry = 2\n"])
def test_what_is_no_source(content):
    with pytest.raises((SyntaxError, ValueError)):
        PythonSource(content)


def test_which_files_are_tests_and_which_are_the_library():
    tests = ["test_a.py", "pkg/a_test.py", "tests/data.json", "tests/helpers.py", "conftest.py", "pkg/test/b.txt"]
    library = ["a.py", "src/pkg/b.py", "testing.py", "pkg/contest.py"]
    neither = ["setup.py", "docs/conf.py", "README.md", "test_data.json"]
    assert [p for p in tests + library + neither if is_test_file(p)] == tests
    assert [p for p in tests + library + neither if is_library_file(p)] == library
