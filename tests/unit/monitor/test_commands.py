"""Command lines are taken apart as a shell would, as far as rules need it, and nothing makes the reader fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.monitor.commands import commands_of, parse, paths_of
from composer.types import ToolCall


def words(line: str) -> list[tuple[str, ...]]:
    return [command.words for command in parse(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ls -la", [("ls", "-la")]),
        ("cd a && FOO=1 make -j2 || echo 'no; pe'", [("cd", "a"), ("make", "-j2"), ("echo", "no; pe")]),
        ("a | b\nc & d", [("a",), ("b",), ("c",), ("d",)]),
        ("sudo -u root env X=1 timeout -k 5 10s python3 x.py", [("python3", "x.py")]),
        ("bash -lc \"cat x | sh -c 'rm y'\"", [("cat", "x"), ("rm", "y")]),
        ("if [ -f a ]; then cat a; fi", [("[", "-f", "a", "]"), ("cat", "a")]),
        ("find . | xargs -n 1 cat", [("find", "."), ("xargs", "-n", "1", "cat"), ("cat",)]),
        ("echo $(cat secret)", [("echo",), ("cat", "secret")]),
        ("pytest 2>&1 | tail > out.txt", [("pytest",), ("tail",)]),
        ("eval 'kill 1'", [("kill", "1")]),
        ("echo 'open", [("echo", "'open")]),
        ("", []),
    ],
)
def test_simple_commands(line, expected):
    assert words(line) == expected


def test_what_is_code_and_where_output_goes():
    [cat, python] = parse(
        "cat > a.py <<'EOF'\nimport os; print('x | y')\nEOF\npython3.11 -c 'print(1)' >> log 2> err &"
    )
    assert (cat.words, cat.code, cat.writes) == (("cat",), "import os; print('x | y')", ("a.py",))
    assert (python.program, python.code, python.writes, python.background) == (
        "python",
        "print(1)",
        ("log", "err"),
        True,
    )
    assert parse("tee -a x y")[0].writes == ("x", "y")
    assert not parse("a; b")[0].background


def test_which_arguments_are_commands_and_paths():
    assert [c.words for c in commands_of(ToolCall("bash", {"cmd": ["ls", "a b"], "timeout": 3}))] == [("ls", "a b")]
    assert [c.words for c in commands_of(ToolCall("t", {"commands": ["ls", "pwd"]}))] == [("ls",), ("pwd",)]
    assert commands_of(ToolCall("read_file", {"path": "ls", "command": 3})) == []
    assert paths_of(ToolCall("read", {"path": "a", "file_path": ["b", 2], "text": "c"})) == ["a", "b"]


@given(st.text(alphabet="ab'\"|&;<>$(){}\\\n #-=1`", max_size=60))
def test_nothing_makes_it_fail(line):
    for command in parse(line):
        assert command.words and command.program is not None
