"""Drift between training and production: distances worked out by hand, and no alarm for chance."""

from __future__ import annotations

import json
import random

import pytest

from composer.behaviour import Behaviour, compare, read_run, read_sessions
from composer.cli import main
from composer.errors import ConfigError
from composer.layout import Layout
from composer.types import Generation, Group, Outcome, ToolCall, Trajectory, Turn


def session(*tools: str) -> Behaviour:
    calls = [ToolCall("shell", {"command": t[1:]}) if t[0] == "$" else ToolCall(t, {"path": "a"}) for t in tools]
    return Behaviour.of(calls)


def by_name(measures):
    return {m.name: m for m in measures}


def test_a_session_is_its_tools_and_programs():
    assert session("read", "$cd x && python3 -m pytest | tail", "edit") == Behaviour(
        ("read", "shell", "edit"), ("cd", "python", "tail")
    )


def test_distances():
    """Calls: 6 of 8 read against 2 of 8: the shares differ by 1/2. All lengths are alike."""
    training = [session("read", "read", "read", "$ls")] * 2 * 8
    production = [session("$ls", "$cat a", "$ls", "read")] * 2 * 8
    found = by_name(compare(training, production))
    assert found["tool shares"].distance == 0.5
    assert sorted(found["tool shares"].examples) == [("read", 0.75, 0.25), ("shell", 0.25, 0.75)]
    assert found["first tool"].distance == 1.0
    assert found["first command"].distance == 0.0  # ls in all
    assert found["program shares"].distance == pytest.approx(1 / 3)  # ls 1 against 2/3
    assert found["calls a session"].distance == 0.0
    assert {n: m.drift for n, m in found.items()} == {
        "tool shares": True,
        "first tool": True,
        "first command": False,
        "program shares": True,
        "calls a session": False,
    }


def test_lengths():
    """Four calls in all against 4 or 8 by halves: the cumulative shares differ by 1/2 at 4."""
    found = by_name(compare([session(*["a"] * 4)] * 20, [session(*["a"] * n) for n in (4, 8) for _ in range(10)]))
    measure = found["calls a session"]
    assert measure.distance == 0.5 and measure.drift and not found["tool shares"].drift
    assert ("90 % quantile", 4.0, 8.0) in measure.examples


def test_chance_is_no_drift():
    """Thirty times two samples of one population: at 1 % for all measures together, hardly ever an alarm."""
    chance, alarms = random.Random(0), 0
    for trial in range(30):
        sessions = [
            session(*chance.choices(["read", "edit", "$ls", "$cat a"], k=chance.randint(1, 9))) for _ in range(40)
        ]
        alarms += any(m.drift for m in compare(sessions[:20], sessions[20:], trial))
    assert alarms <= 2


def test_calls_of_one_session_are_no_independent_evidence():
    """One long session that uses another tool makes a large distance, and no drift."""
    usual = [session("read", "edit")] * 20
    found = by_name(compare(usual, [*usual[:19], session(*["$ls"] * 100)]))
    assert found["tool shares"].distance > 0.5 and not found["tool shares"].drift


def trajectory(*calls: ToolCall) -> Trajectory:
    turns = [Turn([1], Generation([2], [0.0], [0], "stop"), [call]) for call in calls]
    return Trajectory("t", "g", "g/0", turns, [], Outcome.FINISHED, 1.0)


@pytest.fixture
def run_dir(tmp_path):
    layout = Layout(tmp_path / "run")
    layout.ledger.parent.mkdir(parents=True)
    group = Group("g", "t", [trajectory(ToolCall("read", {"path": "a"}), ToolCall("shell", {"command": "ls"}))] * 10)
    events = [
        {"event": "start", "group": "g", "index": 0, "version": 0},
        {"event": "group", "group": "g", "data": group.to_dict()},
    ]
    layout.ledger.write_text("".join(json.dumps(e) + "\n" for e in events) + '{"event": "gro')
    return layout.run_dir


SHAPES = {
    "openai": {
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}},
                    {"id": "2", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}},
                ],
            },
        ]
    },
    "composer": trajectory(ToolCall("read", {"path": "a"}), ToolCall("shell", {"command": "ls"})).to_dict(),
    "session": {
        "task_id": "t",
        "calls": [{"name": "read", "arguments": {}}, {"name": "shell", "arguments": {"command": "ls"}}],
    },
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_sessions_of_every_shape(tmp_path, shape):
    (tmp_path / "s.jsonl").write_text(json.dumps(SHAPES[shape]) + "\n\n" + json.dumps({"messages": []}) + "\n")
    assert read_sessions(tmp_path) == [Behaviour(("read", "shell"), ("ls",))]


def test_the_command(run_dir, tmp_path, capsys):
    assert read_run(Layout(run_dir)) == [Behaviour(("read", "shell"), ("ls",))] * 10
    alike, other = tmp_path / "alike.jsonl", tmp_path / "other.jsonl"
    alike.write_text((json.dumps(SHAPES["openai"]) + "\n") * 12)
    other.write_text((json.dumps({"calls": [{"name": "shell", "arguments": {"command": "make"}}]}) + "\n") * 12)
    assert main(["behaviour", f"env-run={run_dir}", f"sessions={alike}"]) == 0
    assert "10 training episodes, 12 production sessions: 0 of 5 measures have drifted" in capsys.readouterr().out
    assert main(["behaviour", f"sessions={other}", f"env-run={run_dir}"]) == 1
    shown = capsys.readouterr().out
    assert "drift  first tool" in shown and "read 100% -> 0%" in shown
    report = json.loads((run_dir / "behaviour.json").read_text())
    assert report["drift"] and report["measures"][0]["name"] == "tool shares"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "env-run: is missing"),
        (["env-run={run}"], "sessions: is missing"),
        (["env-run={run}", "sesions=x"], "behaviour='sesions=x': write `composer behaviour env-run="),
        (["env-run={run}", "sessions=/nowhere.jsonl"], "sessions='/nowhere.jsonl': cannot be read"),
        (["env-run={tmp}", "sessions={good}"], "no episode with a tool call is recorded in it"),
        (["env-run={run}", "sessions={bad}"], "line 1 is no JSON"),
        (["env-run={run}", "sessions={few}"], "1 sessions with tool calls are too few to compare"),
    ],
)
def test_what_is_wrong_is_one_sentence(run_dir, tmp_path, capsys, words, message):
    for name, text in (
        ("bad", "{\n"),
        ("few", json.dumps(SHAPES["openai"]) + "\n"),
        ("good", json.dumps(SHAPES["openai"]) * 1),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = {"run": run_dir, "tmp": tmp_path, **{n: tmp_path / f"{n}.jsonl" for n in ("bad", "few", "good")}}
    assert main(["behaviour", *(word.format(**paths) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_without_sessions(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.jsonl file"):
        read_sessions(tmp_path)
