"""Rates over steps and examples, counted by hand."""

from __future__ import annotations

import json

from composer.monitor.evidence import Finding, Kind
from composer.monitor.policy import UNJUDGED, Report, settle
from composer.monitor.report import EXAMPLES_PER_RULE, MonitorLog, monitor_metrics, rows
from composer.schema import MonitorConfig, MonitorEffect
from composer.tracking.names import clean_name
from composer.types import Group, Message, Outcome, Trajectory

HISTORY = Finding("reads_later_history", Kind.HISTORY, "git log --all", 2, reason="why")
TESTS = Finding("edits_tests", Kind.TESTS, "assert", path="test_a.py", reason="why")
CONFIG = MonitorConfig(effects={"history": MonitorEffect.zero, "tests": MonitorEffect.quarantine})


def episode(
    name: str, reward: float, *findings: Finding, judged: bool | None = None, looked: bool = True
) -> Trajectory:
    messages = [Message("user", "do " + "x" * 999), Message("assistant", "done")]
    t = Trajectory("t", "g", name, [], messages, Outcome.FINISHED, reward)
    if looked:
        settle(t, Report(list(findings), judged, baits=3), CONFIG)
    return t


GROUPS = [
    Group("a", "t", [episode("a/0", 1.0, HISTORY, HISTORY), episode("a/1", 0.0, TESTS, HISTORY)]),
    Group(
        "b",
        "t",
        [episode("b/0", 1.0, judged=True), episode("b/1", 1.0, Finding(UNJUDGED, Kind.DODGING, "x"), judged=False)],
    ),
]


def test_rates():
    metrics = monitor_metrics(GROUPS)
    assert metrics["monitor/episodes"] == 4 and metrics["monitor/found_share"] == 0.5
    assert metrics["monitor/kind/history"] == 0.5 and metrics["monitor/kind/tests"] == 0.25
    assert metrics["monitor/kind/dodging"] == 0.0, "an outage of the judge is nobody's deed"
    assert (
        metrics["monitor/effect/zero"] == metrics["monitor/effect/quarantine"] == metrics["monitor/effect/flag"] == 0.25
    )
    assert metrics["monitor/found_share_of_rewarded"] == 1 / 3  # a/0, b/0, b/1 had one before
    assert (metrics["monitor/judge/asked"], metrics["monitor/judge/unjudged_share"]) == (2, 0.5)
    assert all(clean_name(name) == name for name in metrics), "MLflow takes the names as they are"


def test_without_the_monitor_there_is_nothing():
    assert monitor_metrics([Group("a", "t", [episode("a/0", 1.0, looked=False)])]) == {}


def test_a_failure_of_the_monitor_is_counted():
    t = episode("a/0", 1.0, looked=False)
    t.metadata["monitor"] = {"failed": "ValueError"}
    assert monitor_metrics([Group("a", "t", [t])])["monitor/failed"] == 1


def test_rows_say_what_where_and_what_it_cost():
    first, _, second, *_ = rows(GROUPS)
    assert (first["rule"], first["kind"], first["where"]) == ("reads_later_history", "history", "step 2")
    assert (first["reward before"], first["reward"], first["effect"]) == (1.0, 0.0, "zero")
    assert (second["where"], second["reward"], second["effect"]) == ("test_a.py", None, "quarantine")


def test_the_file_has_every_steps_rates_and_the_newest_examples(tmp_path):
    path = tmp_path / "stage" / "monitor.json"
    log = MonitorLog(path)
    assert not log.write() and not path.exists()
    for step in range(1, 5):
        assert log.add(step, GROUPS) == monitor_metrics(GROUPS)
    assert log.write()
    resumed = MonitorLog(path)  # a resumed stage goes on, and does a step again
    resumed.add(4, GROUPS)
    resumed.add(5, [Group("c", "t", [episode("c/0", 1.0)])])
    resumed.write()
    content = json.loads(path.read_text())
    assert list(content["steps"]) == ["1", "2", "3", "4", "5"]
    assert content["steps"]["5"]["monitor/found_share"] == 0.0
    examples = content["examples"]["reads_later_history"]
    assert len(examples) == EXAMPLES_PER_RULE and examples[-1]["step"] == 4
    assert examples[0]["request"].endswith("...") and len(examples[0]["request"]) == 200
    assert {row["rule"] for row in resumed.table} == {"reads_later_history", "edits_tests", "unjudged"}


def test_a_damaged_file_is_begun_anew(tmp_path):
    (tmp_path / "monitor.json").write_text('{"steps": [')
    log = MonitorLog(tmp_path / "monitor.json")
    log.add(1, GROUPS)
    assert log.write()
