"""Bars in a terminal, lines in a log, the closing table, the summary file."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest

from composer.tracking.console import Console, bytes_text, duration_text, number_text, write_summary

SUMMARY = {
    "evaluation": {
        "before": {
            "average_at_8": 0.41,
            "standard_error": 0.0412,
            "best_at_8": 0.8,
            "k": 8,
            "generated_tokens": 33.25,
            "turns": 2.1,
            "seconds": 0.31,
        },
        "after": {
            "average_at_8": 0.74,
            "standard_error": math.nan,
            "best_at_8": 0.9,
            "generated_tokens": 30,
            "turns": 2,
            "seconds": 0.3,
        },
    },
    "codebase_loss": {"before": 7.21, "after": 4.4, "after_all_phases": 13.1},
    "stages": {"pretrain": {"steps": 400, "wall_s": 120}},
    "wall_s": 610,
    "peak_rss_bytes": 5.1 * 2**30,
}
COMMAND = "mlflow ui --backend-store-uri sqlite:////" + "a/very/long/path/" * 10 + "mlflow.db --host 127.0.0.1"


def test_a_log_gets_plain_timestamped_lines() -> None:
    stream = io.StringIO()
    console = Console(stream, every_s=0.0)
    with console.stage("rl", total=4) as bar:
        bar.update(1, {"reward": 0.25, "tokens/s": 1234.5})
        console.warn("the server [x] is away")
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines[:1]] == ["rl: 4 steps to do"]
    assert re.fullmatch(r"rl: 1/4 steps, ETA unknown, reward 0.25, tokens/s 1,234", lines[1][9:])
    assert lines[2][9:] == "warning: the server [x] is away"
    assert re.match(r"rl: 1/4 steps, done after ", lines[3][9:])
    assert "\x1b" not in stream.getvalue()


def test_a_log_is_not_flooded() -> None:
    stream = io.StringIO()
    with Console(stream, every_s=60.0).stage("rl", total=1000) as bar:
        for step in range(1000):
            bar.update(step + 1)
    assert len(stream.getvalue().splitlines()) == 2


def test_the_end_of_a_stage_is_one_line() -> None:
    stream = io.StringIO()
    with Console(stream, every_s=0.0).stage("rl", total=2) as bar:
        bar.update(1)
        bar.update(2)
    shown = [line[9:].split(", ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["rl: 2 steps to do", "rl: 1/2 steps", "rl: 2/2 steps"]
    assert "2/2 steps, done after" in stream.getvalue()


def test_a_stage_that_is_interrupted_says_so() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Console(stream).stage("rl", total=4):
        raise KeyboardInterrupt
    assert "stopped after" in stream.getvalue()


def test_a_resumed_stage_counts_from_where_it_was() -> None:
    stream = io.StringIO()
    with Console(stream, every_s=0.0).stage("rl", total=60, done=50) as bar:
        bar.update(51)
    assert "rl: 10 steps to do" in stream.getvalue() and "rl: 51/60 steps" in stream.getvalue()


@pytest.mark.parametrize("known", [0, 50])
def test_the_eta_is_of_this_start(known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the steps of an earlier start count nor the time until the first one of this start."""
    now = 0.0
    monkeypatch.setattr("composer.tracking.console.time.monotonic", lambda: now)
    stream = io.StringIO()
    with Console(stream, every_s=0.0).stage("sft", total=60, done=known) as bar:
        for step, at in ((51, 30.0), (52, 32.0), (55, 38.0)):
            now = at
            bar.update(step)
    etas = [line.split(", ")[1] for line in stream.getvalue().splitlines()[1:4]]
    assert etas == ["ETA unknown", "ETA 16.0s", "ETA 10.0s"]  # two seconds a step, 8 and 5 steps are left


def test_a_terminal_gets_a_bar_with_warnings_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    console = Console(stream, terminal=True)
    with console.stage("rl", total=4) as bar, console.stage("evaluate", total=2) as inner:
        bar.update(2, {"reward": 0.5})
        inner.update(1)
        console.warn("look [here]")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "2/4" in shown and "reward 0.5" in shown and "warning: look [here]" in shown
    assert shown.rindex("evaluate") > shown.index("warning: look [here]")


def test_the_closing_table_says_what_was_learnt() -> None:
    stream = io.StringIO()
    where = {"ui_command": COMMAND, "ui_address": "http://127.0.0.1:5000/#/experiments/1/runs/a"}
    Console(stream).closing_table(SUMMARY, **where, resume_command="composer resume=runs/1", note="note")
    text = stream.getvalue()
    rows = [line.split() for line in text.splitlines()]
    assert ["average@8", "on", "unseen", "tasks", "0.41", "±", "0.041", "0.74", "+0.33"] in rows
    assert ["codebase", "loss,", "pretraining", "(nats", "a", "token)", "7.21", "4.4", "-2.81"] in rows
    assert ["codebase", "loss,", "all", "phases", "(nats", "a", "token)", "7.21", "13.1", "+5.89"] in rows
    assert ["generated", "tokens", "an", "episode", "33.2", "30", "-3.25"] in rows
    assert ["pretrain", "400", "steps,", "2m", "0s"] in rows
    assert ["peak", "memory", "5.1", "GiB"] in rows
    assert all(text.count(piece) == 1 for piece in where.values()), "what is pasted must stay in one piece"
    assert "composer resume=runs/1" in text and text.endswith("note\n")


def test_the_closing_table_of_a_run_that_did_little() -> None:
    stream = io.StringIO()
    Console(stream).closing_table({"evaluation": {"before": {"average_at_8": 0.4}, "after": None}})
    assert ["average@8", "on", "unseen", "tasks", "0.4", "-", "-"] in [
        x.split() for x in stream.getvalue().splitlines()
    ]


def test_without_a_phase_after_pretraining_the_codebase_loss_is_told_once() -> None:
    stream = io.StringIO()
    Console(stream).closing_table({"codebase_loss": {"before": 7.2, "after": 4.4, "after_all_phases": 4.4}})
    assert stream.getvalue().count("codebase loss") == 1


def test_the_closing_table_of_an_interrupted_run() -> None:
    stream = io.StringIO()
    unfinished = {"wall_s": 200, "unit": "step", "done": 12, "of": 1060}
    Console(stream).closing_table({"stages": {"rl": unfinished}, "wall_s": 610, "starts": 3})
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert ["rl", "interrupted", "at", "step", "12", "of", "1,060,", "3m", "20s"] in rows
    assert ["wall", "time", "of", "3", "starts", "10m", "10s"] in rows


def test_a_stream_of_ascii_gets_the_table_too() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    Console(stream).closing_table(SUMMARY)
    assert b"0.41 +- 0.041" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_closed_stream_stops_nothing() -> None:
    stream = io.StringIO()
    console = Console(stream, every_s=0.0)
    stream.close()
    with console.stage("rl", total=1) as bar:
        bar.update(1)
    console.closing_table(SUMMARY)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("place", [None, "/dev/full"])
def test_a_stream_that_is_missing_or_fails_stops_nothing(
    place: str | None, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = place and open(place, "w", buffering=1)  # noqa: PTH123, SIM115
    monkeypatch.setattr("sys.stdout", stream)
    console = Console(every_s=0.0, terminal=terminal)
    with console.stage("rl", total=1) as bar:
        bar.update(1)
    console.warn("it goes on")
    console.closing_table(SUMMARY, ui_command=COMMAND)
    assert console._progress is None
    if stream:
        with contextlib.suppress(OSError):
            stream.close()


def test_the_summary_is_whole_and_strict_json(tmp_path: Path) -> None:
    path = write_summary(
        tmp_path, {"evaluation": {"after": {"average_at_8": math.nan}}, "wall_s": 1.5, "x": [math.inf]}
    )
    assert json.loads(path.read_text()) == {"evaluation": {"after": {"average_at_8": None}}, "wall_s": 1.5, "x": [None]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.03125, "0.0312"), (1.0, "1"), (1234.4, "1,234"), (5.1e9, "5.1e+09"), (None, "-"), (7, "7"), (-0.5, "-0.5")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_durations_and_sizes() -> None:
    assert [duration_text(s) for s in (0.25, 59.9, 190, 7500)] == ["0.2s", "59.9s", "3m 10s", "2h 5m"]
    assert [bytes_text(b) for b in (512, 1536, 5.1 * 2**30)] == ["512 B", "1.5 KiB", "5.1 GiB"]


def test_nan_is_shown() -> None:
    assert number_text(math.nan) == "nan"
    assert number_text(math.inf) == "inf"
