"""Text that others wrote, on a terminal: nothing of it steers the terminal, and nothing of it is markup."""

from __future__ import annotations

import asyncio
import io
import json
import re

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from composer import look
from composer.behaviour import behaviour
from composer.cli import main
from composer.contract import ExecResult
from composer.errors import ConfigError
from composer.layout import Layout
from composer.streams import say, say_error
from composer.terminal import printable, rich_console
from composer.tracking.console import Console

EVIL = "x\x1b]52;c;cm0gLXJmIH4K\x07\x1b[2J\x9b31m\r\x08\u202e"
"""Sets the clipboard, clears the screen, goes on in red, overwrites its line, turns its direction."""
SHOWN = r"x\x1b]52;c;cm0gLXJmIH4K\x07\x1b[2J\x9b31m\x0d\x08\u202e"
WITHOUT_BELLS = SHOWN.replace(r"\x07", "").replace(r"\x08", "").replace(r"\x0d", "")
"""Which rich leaves out by itself."""
HARMLESS = "plain\ttext, Zürich 日本 🙂\nsecond line"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_control_characters_become_their_escapes():
    assert printable(EVIL) == SHOWN and printable(HARMLESS) == HARMLESS


def test_what_is_said_steers_nothing(capsys):
    say(EVIL)
    say_error(ConfigError("look.state", f"/tmp/{EVIL}", "name another"))
    out, err = capsys.readouterr()
    assert out == SHOWN + "\n" and "\x1b" not in err and r"\x1b]52;" in err and r"\x9b31m" in err


@pytest.mark.parametrize("force_terminal", [True, False])
def test_a_console_shows_text_as_it_is(force_terminal):
    stream = io.StringIO()
    colours = "standard" if force_terminal else None
    console = rich_console(file=stream, force_terminal=force_terminal, width=200, color_system=colours, _environ={})
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row("\\[/red]" + EVIL)
    table.add_row(Text(EVIL, "red"))
    console.print(table)
    console.print("[/bold]:smile:" + EVIL, highlight=False)
    shown = COLOURS.sub("", stream.getvalue()) if force_terminal else stream.getvalue()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert shown.count(WITHOUT_BELLS) == 5 and r"\[/red]" in shown and "[/bold]:smile:" in shown
    assert ("\x1b[31m" in stream.getvalue()) == force_terminal, "its own colours stay"


def test_bars_still_move():
    stream = io.StringIO()
    console = rich_console(file=stream, force_terminal=True, width=80, _environ={})
    with Progress(console=console, refresh_per_second=1000) as progress:
        task = progress.add_task("work", total=2)
        console.print("between")
        progress.update(task, completed=2, refresh=True)
    assert "\x1b[2K" in stream.getvalue() and "between" in stream.getvalue() and "100%" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_of_a_run_steers_nothing(terminal):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    console = Console(stream)
    console.warn(EVIL)
    console.closing_table({}, note=EVIL)
    assert "\x1b]" not in stream.getvalue() and "\x9b" not in stream.getvalue() and "\x07" not in stream.getvalue()
    assert r"\x1b]52;" in stream.getvalue()


@pytest.mark.parametrize("name", ["\\[/red]", "[/red]", EVIL])
def test_tools_of_any_name_are_compared(tmp_path, capsys, name):
    layout = Layout(tmp_path / "run")
    layout.ledger.parent.mkdir(parents=True)
    turns = [{"tool_calls": [{"name": name, "arguments": {}}]}]
    layout.ledger.write_text(json.dumps({"event": "group", "data": {"trajectories": [{"turns": turns}] * 12}}) + "\n")
    session = {"messages": [{"tool_calls": [{"function": {"name": "read_file", "arguments": "{}"}}]}]}
    (tmp_path / "s.jsonl").write_text(f"{json.dumps(session)}\n" * 20)
    assert behaviour([f"env-run={layout.run_dir}", f"sessions={tmp_path / 's.jsonl'}"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and printable(name)[:6] in out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_looking_into_a_state(capsys, monkeypatch, is_terminal):
    """A terminal is steered by nothing in it; a file gets every byte."""

    class Sandbox:
        async def shell(self, command: str) -> ExecResult:
            return ExecResult(3, f"{EVIL}a\r\nb\n".encode())

    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert asyncio.run(look._run(Sandbox(), "cat notes")) == 3  # pyright: ignore[reportArgumentType]
    assert capsys.readouterr().out == (f"{SHOWN}a\nb\n" if is_terminal else f"{EVIL}a\r\nb\n")


def test_an_error_of_the_command_steers_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["behaviour", f"env-run={EVIL}", "sessions=x"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\x9b" not in err and r"\x1b]52;" in err
