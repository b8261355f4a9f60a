"""What the stages write into the record of a run: metrics each step, one file, one table; trouble stops nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

from composer.layout import Layout
from composer.monitor.evidence import Finding, Kind
from composer.monitor.policy import Report, settle
from composer.schema import MonitorConfig, Stage
from composer.stages import _MonitorRecord, _row
from composer.types import Group, Message, Outcome, Trajectory


class StandInRecord:
    """Keeps what it is given, in place of MLflow."""

    def __init__(self):
        self.logged, self.artifacts, self.tables = [], [], []

    def log(self, step, metrics, stage):
        self.logged.append((step, metrics, stage))

    def artifact(self, path, folder, stage):
        self.artifacts.append((path, folder, stage))

    def table(self, name, rows, stage):
        self.tables.append((name, rows, stage))


def make(tmp_path):
    record, warnings = StandInRecord(), []
    run = SimpleNamespace(record=record, layout=Layout(tmp_path), console=SimpleNamespace(warn=warnings.append))
    return _MonitorRecord(run, Stage.rl), record, warnings


def groups(looked=True):
    t = Trajectory("t", "g", "g/0", [], [Message("user", "fix")], Outcome.FINISHED, 1.0)
    if looked:
        settle(t, Report([Finding("reads_caches", Kind.CACHES, "cat .mypy_cache/x", 0)]), MonitorConfig())
    return [Group("g", "t", [t])]


def test_a_stage_with_findings(tmp_path):
    found, record, warnings = make(tmp_path)
    found.log(1, groups())
    found.log(2, groups())
    found.close()
    assert [(step, metrics["monitor/kind/caches"], stage) for step, metrics, stage in record.logged] == [
        (1, 1.0, "rl"),
        (2, 1.0, "rl"),
    ]
    [(path, folder, stage)] = record.artifacts
    assert (folder, stage) == ("monitor", "rl") and list(json.loads(path.read_text())["steps"]) == ["1", "2"]
    [(name, rows, _)] = record.tables
    assert name == "rl_monitor.json" and [r["step"] for r in rows] == [1, 2] and rows[0]["rule"] == "reads_caches"
    assert not warnings


def test_a_stage_without_the_monitor_writes_nothing(tmp_path):
    found, record, _ = make(tmp_path)
    found.log(1, groups(looked=False))
    found.close()
    assert not record.logged and not record.artifacts and not record.tables and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_said_and_stops_nothing(tmp_path):
    (tmp_path / "stages").write_text("in the way")
    found, record, warnings = make(tmp_path)
    found.log(1, groups())
    found.close()
    assert record.logged and not record.artifacts and "monitor's examples are lost" in warnings[0]


def test_a_row_of_an_evaluation_says_why_there_is_no_reward():
    t = Trajectory("t", "g", "g/0", [], [], Outcome.FINISHED, None, quarantine="the cheat monitor has it in quarantine")
    assert _row(t)["error"] == "the cheat monitor has it in quarantine"
