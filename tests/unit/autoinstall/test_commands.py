"""Which commands are fit, and when an output is the expected one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.autoinstall.commands import Command, modules, programs, unfit
from composer.contract import ExecResult

TESTS = Command("pytest -q", "tests", ("3 passed",))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pytest", ["pytest"]),
        ("cd lib && CC=gcc make -s | tail -1; timeout 9 python3 -m pytest > out", ["cd", "make", "tail", "python3"]),
        ("env A=1 nice -n 5 ./run.sh 2>&1 || exit 1", ["./run.sh", "exit"]),
        ("(make; ./calc '1 | 2')", ["make", "./calc"]),
        ("A=1", []),
    ],
)
def test_programs_of_a_command(line, expected):
    assert programs(line) == expected


def test_modules_of_a_command():
    assert modules("python3 -W error -m pytest.console -q; python -m build") == ["pytest", "build"]
    assert modules("python3 main.py -m pytest") == ["pytest"]  # one too many is guarded as well
    assert modules("pytest -m slow") == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (Command("true", "", ("x",)), "it is trivial"),
        (Command("ls && cat README", "", ("x",)), "it is trivial"),
        (Command("FOO=1", "", ("x",)), "it is trivial"),
        (Command("pytest 'tests", "", ("x",)), "quotes"),
        (Command("pytest", ""), "it expects no output"),
        (Command("pytest  -q", "again", ("4 passed",)), "proposed already"),
        (Command("ruff --version", "", ("ruff",)), "only asks for a version"),
        (Command("python3 -c 'print(\"7 passed\")'", "", ("7 passed",)), "stands in the command"),
        (Command("python3 -m shop", "", pattern="a*"), "matches an empty output"),
        (Command("python3 -m shop", "", pattern="("), "no regular expression"),
        (Command("python3 -m shop", "", pattern="sho."), "matches the command itself"),
        (Command("pytest -x", "", ("3 passed in 0.12s",)), "'0.12s' in '3 passed in 0.12s' is a duration"),
        (Command("pytest -x", "", ("built on 2024-05-01",)), "is a date"),
        (Command("pytest -x", "", ("<Cart at 0x7f3a2b1c>",)), "is an address"),
        (Command("pytest -x -p $RANDOM", "", ("3 passed",)), "not deterministic"),
    ],
)
def test_unfit_commands_and_why(command, said):
    assert said in unfit(command, [TESTS])


@pytest.mark.parametrize(
    "command",
    [
        TESTS,
        Command("make && ./calc 2 3", "", ("sum: 5",)),
        Command("python3 -m shop 100", "", pattern=r"^to pay: \d+"),
        Command("cd lib && make check", "", ("all 3 hold",)),
        Command("ruff check .", "", ("All checks passed!",)),
    ],
)
def test_fit_commands(command):
    assert unfit(command) == ""


def ran(output: str, exit_code: int = 0, **more) -> ExecResult:
    return ExecResult(exit_code, output.encode(), **more)


def test_an_output_with_everything_has_no_difference():
    command = Command("x", "", ("3 passed", "a  b"), r"^total: \d$", 1)
    assert command.difference(ran("== \x1b[32m3 passed\x1b[0m in 0.1s ==\r\n  a b c\ntotal: 7\n", 1)) == ""


def test_a_difference_names_all_that_is_missing_and_shows_the_output():
    command = Command("x", "", ("3 passed", "a"), "^b$")
    difference = command.difference(ran("2 passed, a bb", 4))
    assert difference == (
        "exit code 4 in place of 0; no line with '3 passed'; nothing matches '^b$'. It printed:\n2 passed, a bb"
    )
    assert command.difference(ran("", timed_out=True, seconds=9.0)).startswith("it was stopped after 9 s")


def test_a_pattern_that_takes_for_ever_is_not_found_in_time():
    start = time.monotonic()
    assert Command("x", "", pattern="(a+)+$").missing(ran("a" * 60 + "b"))
    assert time.monotonic() - start < 10


@given(st.text(max_size=60))
def test_no_text_breaks_the_reading_of_commands(line):
    programs(line)
    modules(line)
    unfit(Command(line, "", (line or "x",), line))


def test_a_command_survives_its_record():
    command = Command("x", "why", ("a",), "b", 2)
    assert Command.from_dict(command.to_dict()) == command
