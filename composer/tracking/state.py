"""What is known about a run's place in MLflow: `<run_dir>/mlflow.json`, written whole by renaming.

It holds what *should* be there (runs, statuses, parameters, artifacts) beside what was *sent* (run ids, sent statuses,
positions in the journals). The sender works off the difference, in this process or in a later one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.identity import start_time

FILE_NAME = "mlflow.json"
SWEEP_VARIABLE = "COMPOSER_SWEEP_DIR"
"""Environment variable of a sweep's job: the run directory of the sweep's parent."""
_SIGNS = ("metrics.jsonl", "traces.jsonl", "times.json")
RUNNING, FINISHED, FAILED, KILLED = "RUNNING", "FINISHED", "FAILED", "KILLED"


@dataclass
class RunEntry:
    """One MLflow run: the parent (stage "") or a stage."""

    name: str
    start_ms: int
    """Unix time, milliseconds."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tag that finds the run again if the answer to its creation was lost."""
    run_id: str | None = None
    creating: bool = False
    """A request to create it was sent; without `run_id` its answer was lost."""
    status: str = RUNNING
    sent_status: str | None = None
    end_ms: int | None = None
    tags: dict[str, str] = field(default_factory=dict)
    """Tags still to be sent."""
    params_sent: bool = False


@dataclass
class ArtifactEntry:
    """A file still to be sent."""

    stage: str
    path: str
    folder: str
    attempts: int = 0


@dataclass
class State:
    """Everything about one run directory's record."""

    uri: str
    """Without password."""
    experiment: str
    created_ms: int
    artifact_location: str | None = None
    """Where a new experiment keeps its artifacts; None: the server's own place."""
    experiment_id: str | None = None
    pid: int = 0
    process_start: int = 0
    host: str = ""
    sweep_dir: str | None = None
    runs: dict[str, RunEntry] = field(default_factory=dict)
    """Stage name -> run; "" is the parent."""
    params: dict[str, str] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    """Journal file name -> bytes that reached the server."""
    artifacts: list[ArtifactEntry] = field(default_factory=list)
    peak_bytes: int = 0
    """The most memory that the run's processes used together, over all sessions."""
    num_dropped: int = 0
    """Records lost: neither the disk nor the server took them."""
    num_refused: int = 0
    """Records that the server refused for good."""

    @property
    def parent(self) -> RunEntry:
        """The run that the stages are nested in."""
        return self.runs[""]

    def reopen(self, uri: str, experiment: str, run_dir: Path) -> None:
        """Prepare an earlier session's state to be continued; stages that a `kill -9` left running end as killed.

        Args:
            uri: of the server of this session, without password. Another one than before gets everything anew.
            experiment: likewise.
            run_dir: where the state lies.
        """
        if (uri, experiment) != (self.uri, self.experiment):
            self.uri, self.experiment = uri, experiment
            self.forget_sent()
        self.end_killed(run_dir)
        self.parent.status, self.parent.end_ms = RUNNING, None

    def end_killed(self, run_dir: Path) -> None:
        """End what a `kill -9` left running, at the last sign of life of the process that wrote the record."""
        for run in self.runs.values():
            if run.status == RUNNING:
                run.status, run.end_ms = KILLED, max(run.start_ms, last_sign_ms(run_dir))

    def forget_sent(self) -> None:
        """Nothing has been sent: the next session fills a server with all that the journals hold."""
        self.experiment_id = None
        self.positions.clear()
        for run in self.runs.values():
            run.run_id, run.sent_status, run.params_sent, run.creating = None, None, False, False

    def claim(self) -> None:
        """Note this process as the one that writes the record."""
        self.pid, self.process_start, self.host = os.getpid(), start_time(os.getpid()) or 0, socket.gethostname()

    def release(self) -> None:
        """Note that nobody writes the record any more."""
        self.pid, self.process_start = 0, 0

    def writer_is_dead(self) -> bool:
        """Whether the process that wrote the record is gone. Another machine's process counts as alive."""
        return self.host == socket.gethostname() and start_time(self.pid) != self.process_start

    def save(self, run_dir: Path) -> None:
        """Write it.

        Raises:
            OSError: it could not be written; the file that was there stays.
        """
        path = run_dir / FILE_NAME
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(dataclasses.asdict(self), indent=1))
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def load(run_dir: Path) -> State | None:
    """Read a run directory's record; None if there is none or it cannot be read."""
    try:
        raw: dict[str, Any] = json.loads((run_dir / FILE_NAME).read_text())
        raw["runs"] = {stage: RunEntry(**entry) for stage, entry in raw["runs"].items()}
        raw["artifacts"] = [ArtifactEntry(**entry) for entry in raw["artifacts"]]
        state = State(**raw)
        return state if "" in state.runs else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def last_sign_ms(run_dir: Path) -> int:
    """When the process that wrote a record was last seen alive (Unix milliseconds), by what only it writes.

    Whoever resumes a run has written to its directory (lock, config, log) before it comes here, and the state file is
    written by others' repairs too: it counts only where nothing else is.
    """
    written = [path.stat().st_mtime for name in _SIGNS if (path := run_dir / name).exists()]
    return int(max(written or [(run_dir / FILE_NAME).stat().st_mtime]) * 1000)


def now_ms() -> int:
    """Unix time in milliseconds."""
    return int(time.time() * 1000)
