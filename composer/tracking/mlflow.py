"""The record of a run: a parent MLflow run with one nested run a stage. The only way in which the product logs.

Opened once, by the driver, which is the one writer. Logging never blocks and never fails: a record is a line in the run
directory first (`metrics.jsonl`, `traces.jsonl`), and a background thread brings the lines to MLflow.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from composer.shell import free_port, pasteable
from composer.terminal import printable
from composer.tracking import state as states
from composer.tracking.journal import encode_number
from composer.tracking.names import anchored_uri, flatten, numbers, redact, sqlite_path, sqlite_uri, value_text
from composer.tracking.sender import METRICS, TRACES, Sender
from composer.tracking.server import Server
from composer.tracking.state import ArtifactEntry, RunEntry, State
from composer.tracking.system import SystemSampler
from composer.types import Trajectory

KILLED_DEADLINE_S = 3.0
"""An interrupted run has 10 s to end everything; sending the record takes no more than this of it."""
CLOSE_DEADLINE_S = 60.0
UI_PORT = 5000
"""Where `mlflow ui` listens unless told otherwise."""
_HTTP = ("http://", "https://")


@dataclass(frozen=True)
class RecordReport:
    """How a closed record ended."""

    run_id: str | None
    """MLflow's id of the parent run; None if the server was never reached."""
    num_unsent: int
    """Metric lines, traces and artifacts that are only in the run directory."""
    num_refused: int
    """Those that MLflow refused for good."""
    num_dropped: int
    """Those lost, because neither the disk nor the server took them."""
    sentence: str
    """What of this a user has to know; empty if everything arrived."""


class Record:
    """The record of one run directory.

    Example:
        >>> with Record.open(config, run_dir) as record:                        # doctest: +SKIP
        ...     with record.stage("rl") as stage:
        ...         stage.log(1, {"reward/mean": 0.4})
    """

    def __init__(
        self,
        run_dir: Path,
        state: State,
        server: Server,
        *,
        warn: Callable[[str], None],
        system_metrics_every_s: float | None,
        retry_s: tuple[float, float] = (5.0, 300.0),
        run_root: Path | None = None,
    ) -> None:
        """Use `open`, which makes the state and the server from a config."""
        self.run_dir = run_dir
        self.report: RecordReport | None = None
        """There after `close`."""
        self._state = state
        self._server = server
        self._lock = threading.RLock()
        self._sender = Sender(run_dir, state, self._lock, server, warn, retry_s, run_root)
        self._sender.save()
        self._sender.start()
        self._sampler = SystemSampler(self._log_system, system_metrics_every_s) if system_metrics_every_s else None
        atexit.register(self.close, states.KILLED)

    @classmethod
    def open(
        cls,
        config: Any,
        run_dir: Path | str,
        *,
        warn: Callable[[str], None] | None = None,
        sweep_dir: Path | str | None = None,
        tags: Mapping[str, str] | None = None,
        name: str | None = None,
        retry_s: tuple[float, float] = (5.0, 300.0),
    ) -> Record:
        """Open the record of a run, or continue it where `<run_dir>/mlflow.json` is there.

        Args:
            config: the resolved config, `composer.schema.Config` or its nested mapping. Read: `run_root`, `seed`,
                `tracking.{uri,experiment,run_name,timeout_s,system_metrics_every_s}`; all of it becomes parameters.
            run_dir: exists; its name is the run's name unless `tracking.run_name` or `name` says otherwise.
            warn: gets plain sentences about trouble; None: standard error.
            sweep_dir: the run directory of a sweep's parent; None: the environment's COMPOSER_SWEEP_DIR, if any.
            tags: further tags (git commit, experiment names).
            name: name of the run in MLflow.
            retry_s: first and longest wait after a failure of the server, in seconds.

        Returns:
            The record, at once: nothing has been sent yet.
        """
        run_dir = Path(run_dir).absolute()
        settings = config if isinstance(config, Mapping) else dataclasses.asdict(config)
        tracking = settings.get("tracking") or {}
        run_root = Path(settings.get("run_root") or run_dir.parent).absolute()
        uri = anchored_uri(tracking.get("uri") or sqlite_uri(run_root / "mlflow.db"), Path.cwd())
        experiment = tracking.get("experiment") or "composer"
        sweep = sweep_dir or os.environ.get(states.SWEEP_VARIABLE) or None
        state = states.load(run_dir)
        if state is None:
            state = State(uri=redact(uri), experiment=experiment, created_ms=states.now_ms())
            state.runs[""] = RunEntry(tracking.get("run_name") or name or run_dir.name, state.created_ms)
            state.params = {key: value_text(value) for key, value in flatten(settings).items()}
        else:
            state.reopen(redact(uri), experiment, run_dir)
        state.claim()
        if sweep is not None:
            state.sweep_dir = str(Path(sweep).absolute())
        state.parent.tags.update(_standard_tags(run_dir, settings.get("seed")))
        state.parent.tags.update(tags or {})
        state.artifact_location = _artifact_location(uri, run_root, experiment)
        server = Server(uri, experiment, state.artifact_location, float(tracking.get("timeout_s") or 10.0))
        return cls(
            run_dir,
            state,
            server,
            warn=warn or _warn_on_stderr,
            system_metrics_every_s=tracking.get("system_metrics_every_s"),
            retry_s=retry_s,
            run_root=run_root,
        )

    def stage(self, name: str) -> StageRecord:
        """Open a nested run, or continue the one of this name. Use it as a context manager."""
        with self._lock:
            run = self._state.runs.get(name)
            if run is None:
                self._state.runs[name] = RunEntry(name, states.now_ms(), tags={"stage": name})
            else:
                run.status, run.end_ms = states.RUNNING, None
        self._sender.save()
        return StageRecord(self, name)

    def log(self, step: int, metrics: Mapping[str, float], stage: str | None = None) -> None:
        """Record metrics of the parent run (or of a stage). Any name and any number will do; raises nothing.

        Args:
            step: >= 0, in whatever the run or stage counts.
            metrics: name -> value; NaN and infinities are kept as such in `metrics.jsonl`, as NaN in MLflow.
            stage: a stage that was opened; None: the parent.
        """
        try:
            encoded = {str(name): encode_number(value) for name, value in metrics.items()}
            record = {"time": states.now_ms(), "stage": stage, "step": int(step), "metrics": encoded}
        except (TypeError, ValueError) as error:
            self._sender.warn_once("value", f"A metric at step {step} is no number ({error}): it is not recorded.")
            return
        self._sender.append(METRICS, record)

    def results(self, results: Mapping[str, Any]) -> None:
        """Record a run's results on the parent run, nested names joined by `/`: what runs are compared by."""
        self.log(0, numbers(results))

    def artifact(self, path: Path | str, folder: str = "", stage: str = "") -> None:
        """Send a file to MLflow. It is read later, in the background: leave it where it is. Raises nothing."""
        with self._lock:
            self._state.artifacts.append(ArtifactEntry(stage, str(Path(path).absolute()), folder))
        self._sender.save()

    def table(self, name: str, rows: Iterable[Mapping[str, Any]], stage: str = "") -> None:
        """Record rows as a table: a file in `<run_dir>/tables`, and an artifact that MLflow shows as a table.

        Args:
            name: file name ending in `.json`.
            rows: any mappings; columns are their keys in order of appearance.
            stage: a stage that was opened; "": the parent.
        """
        listed = list(rows)
        columns = list(dict.fromkeys(column for row in listed for column in row))
        table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in listed]}
        path = self.run_dir / "tables" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(table, default=str))
        except (OSError, ValueError) as error:
            self._sender.warn_once("table", f"The table {path} could not be written ({error}); training goes on.")
            return
        self.artifact(path, "tables", stage)

    def plots(self) -> None:
        """Draw the curves so far into `<run_dir>/plots` and record them as artifacts. Raises nothing."""
        from composer.tracking.plots import draw

        try:
            for path in draw(self.run_dir):
                self.artifact(path, "plots")
        except Exception as error:
            self._sender.warn_once("plots", f"The curves could not be drawn ({error}); their numbers are recorded.")

    def trace(self, trajectory: Trajectory, step: int, stage: str | None = None) -> None:
        """Record an episode as a trace with a span a turn and a span a tool call. Raises nothing."""
        try:
            record = {"time": states.now_ms(), "stage": stage, "step": int(step), "trajectory": trajectory.to_dict()}
            self._sender.append(TRACES, record)
        except Exception as error:
            self._sender.warn_once("trace", f"An episode could not be recorded as a trace ({error}).")

    @property
    def peak_rss_bytes(self) -> int:
        """The most memory that the run's processes used together so far, earlier starts included.

        `system.py` says how it is counted.
        """
        return max(self._state.peak_bytes, self._sampler.peak_bytes if self._sampler else 0)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the parent run, once the server has given one."""
        return self._state.parent.run_id

    @property
    def ui_command(self) -> str:
        """The command that serves MLflow on this record; empty where a tracking server does."""
        uri = redact(self._server.uri)
        if uri.startswith(_HTTP):
            return ""
        port = () if self._ui_port == UI_PORT else ("--port", str(self._ui_port))
        return pasteable("mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1", *port)

    @property
    def ui_address(self) -> str:
        """Where a browser finds this run."""
        uri, experiment = redact(self._server.uri), self._state.experiment_id
        server = uri.rstrip("/") if uri.startswith(_HTTP) else f"http://127.0.0.1:{self._ui_port}"
        return f"{server}/#/experiments/{experiment}/runs/{self.run_id}" if experiment and self.run_id else server

    @functools.cached_property
    def _ui_port(self) -> int:
        return free_port(UI_PORT)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything has reached MLflow. Returns whether it has."""
        return self._sender.flush(timeout_s)

    def close(self, status: str = states.FINISHED, deadline_s: float | None = None) -> None:
        """End the run with a status, and whatever stage is still running with it. Idempotent; raises nothing.

        Args:
            status: FINISHED, FAILED or KILLED.
            deadline_s: how long what is left may take to be sent; None: 3 s for KILLED, else 60 s. A server that cannot
                be reached is tried once more, for at most `tracking.timeout_s`.
        """
        if self.report is not None:
            return
        if self._sampler:
            self._sampler.stop()
        with self._lock:
            for run in self._state.runs.values():
                if run.status == states.RUNNING:
                    run.status, run.end_ms = status, states.now_ms()
        if deadline_s is None:
            deadline_s = KILLED_DEADLINE_S if status == states.KILLED else CLOSE_DEADLINE_S
        self._sender.save()
        self._sender.stop(deadline_s)
        with self._lock:
            self._state.release()
        self._sender.save()
        self.report = self._make_report()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        """The record itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close: FINISHED, KILLED after an interrupt, FAILED after any other error."""
        self.close(_status(kind))

    def _end_stage(self, name: str, status: str) -> None:
        with self._lock:
            run = self._state.runs[name]
            run.status, run.end_ms = status, states.now_ms()
        self._sender.save()

    def _log_system(self, metrics: dict[str, float]) -> None:
        with self._lock:
            self._state.peak_bytes = max(self._state.peak_bytes, int(metrics["system/peak_memory_bytes"]))
        # Seconds since the run was first opened: grows over resumes, and reads well on an axis.
        self.log((states.now_ms() - self._state.created_ms) // 1000, metrics)

    def _make_report(self) -> RecordReport:
        unsent = self._sender.num_unsent()
        state = self._state
        parts = []
        if unsent:
            parts.append(
                f"{unsent} records did not reach {redact(self._server.uri)}: they are in {self.run_dir}, "
                f"and `{shlex.quote(sys.executable)} -m composer.tracking {shlex.quote(str(self.run_dir))}` sends them."
            )
        if state.num_refused:
            parts.append(f"MLflow refused {state.num_refused} records; they are in {self.run_dir}.")
        if state.num_dropped:
            parts.append(f"{state.num_dropped} records are lost: neither the disk nor MLflow took them.")
        return RecordReport(state.parent.run_id, unsent, state.num_refused, state.num_dropped, " ".join(parts))


class StageRecord:
    """The nested run of one stage: the same calls as the record's, on the stage's own run."""

    def __init__(self, record: Record, name: str) -> None:
        """Use `Record.stage`."""
        self.record = record
        self.name = name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at a step of the stage; see `Record.log`."""
        self.record.log(step, metrics, self.name)

    def trace(self, trajectory: Trajectory, step: int) -> None:
        """Record an episode as a trace; see `Record.trace`."""
        self.record.trace(trajectory, step, self.name)

    def table(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record rows as a table; see `Record.table`."""
        self.record.table(name, rows, self.name)

    def __enter__(self) -> Self:
        """The stage itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the nested run with the status that fits how the block ended."""
        self.record._end_stage(self.name, _status(kind))


def _status(kind: type[BaseException] | None) -> str:
    if kind is None:
        return states.FINISHED
    return states.FAILED if issubclass(kind, Exception) else states.KILLED


def _artifact_location(uri: str, run_root: Path, experiment: str) -> str | None:
    """Beside an SQLite file, in the run root for another database; a server has its own place."""
    if uri.startswith(("http://", "https://")):
        return None
    database = sqlite_path(uri)
    folder = database.absolute().parent if database else run_root
    return (folder / "mlartifacts" / experiment).as_uri()


def _standard_tags(run_dir: Path, seed: Any) -> dict[str, str]:
    from composer import __version__

    return {
        "mlflow.source.name": "composer",
        "mlflow.source.type": "LOCAL",
        "mlflow.user": os.environ.get("USER") or str(os.getuid()),
        "composer.version": __version__,
        "run_dir": str(run_dir),
        **({} if seed is None else {"seed": str(seed)}),
        **_git_commit(Path(__file__).parents[2]),
    }


def _git_commit(checkout: Path) -> dict[str, str]:
    """The commit that the code was checked out at; nothing for an installed wheel."""
    if not (checkout / ".git").exists():
        return {}
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2.0)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"mlflow.source.git.commit": done.stdout.strip()} if done.returncode == 0 else {}


def _warn_on_stderr(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)
