"""The background thread that brings a record to MLflow: what should be there, minus what was sent.

It reads the journals in the run directory, so its backlog is on disk and has no bound that could stop training; only
records that the disk refused wait in memory (a bounded queue). A server that fails is left alone for a time that
doubles, up to five minutes, and is then given everything it missed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer.tracking import state as states
from composer.tracking.journal import Journal, decode_number
from composer.tracking.names import Names, finite_or_nan, redact
from composer.tracking.server import Server, ServerRefusedError, ServerUnreachableError
from composer.tracking.state import ArtifactEntry, RunEntry, State
from composer.tracking.traces import plan_spans, trace_id

METRICS, TRACES = "metrics.jsonl", "traces.jsonl"
MAX_IN_MEMORY = 10_000
MAX_ARTIFACT_ATTEMPTS = 3
SEND_EVERY_S = 1.0


class Sender:
    """Sends until nothing is left, in its own daemon thread."""

    def __init__(
        self,
        run_dir: Path,
        state: State,
        lock: threading.RLock,
        server: Server,
        warn: Callable[[str], None],
        retry_s: tuple[float, float] = (5.0, 300.0),
        run_root: Path | None = None,
    ) -> None:
        """Set up; `start` begins.

        Args:
            run_dir: holds the journals and the state file.
            state: shared with the record; touched only under `lock`.
            lock: held for moments, never during a request.
            server: where to send to.
            warn: gets one plain sentence when something goes wrong for the first time.
            retry_s: first and longest wait after a failure, in seconds.
            run_root: below which other runs lie, as `<day>/<run>` or `<day>/<sweep>/<job>`.
        """
        self.run_dir = run_dir
        self.run_root = run_root or run_dir.parent
        self.state = state
        self.lock = lock
        self.server = server
        self.warn = warn
        self.journals = {METRICS: Journal(run_dir / METRICS), TRACES: Journal(run_dir / TRACES)}
        self.memory: deque[tuple[str, dict[str, Any]]] = deque()
        self.unreachable = ""
        """Why the server could not be reached at the last attempt; empty if it could."""
        self._retry_s = retry_s
        self._names: dict[str, Names] = {}
        self._checked = False
        self._sweep_pending = state.sweep_dir is not None
        self._warned: set[str] = set()
        self._wake = threading.Event()
        self._stopping = False
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._loop, name="mlflow-sender", daemon=True)

    def start(self) -> None:
        """Begin sending."""
        self._thread.start()

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Put a record into a journal, or into memory if the disk does not take it. Never raises, never waits."""
        try:
            self.journals[name].append(record)
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self.warn_once(
                f"disk:{name}",
                f"{self.run_dir / name} cannot be written ({reason}): records go to MLflow only, training goes on; "
                f"free some space.",
            )
            with self.lock:
                if len(self.memory) >= MAX_IN_MEMORY:
                    self.memory.popleft()
                    self.state.num_dropped += 1
                self.memory.append((name, record))

    def stop(self, deadline_s: float) -> None:
        """Send what is left, for at most `deadline_s`; returns earlier if the server cannot be reached."""
        self._deadline = time.monotonic() + deadline_s
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        if not self._thread.is_alive():
            self.server.close()
        for journal in self.journals.values():
            journal.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything has arrived. Returns whether it has."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._thread.is_alive():
            if not self.num_unsent() and not self._statuses_unsent():
                return True
            self._wake.set()
            time.sleep(0.05)
        return not self.num_unsent()

    def num_unsent(self) -> int:
        """Records (metric lines, traces, artifacts) that have not reached the server."""
        with self.lock:
            positions = dict(self.state.positions)
            others = len(self.memory) + len(self.state.artifacts)
        return others + sum(journal.count(positions.get(name, 0)) for name, journal in self.journals.items())

    def warn_once(self, kind: str, sentence: str) -> None:
        """Say something once; a console that fails is no reason to stop either."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        with contextlib.suppress(Exception):
            self.warn(sentence)

    def save(self) -> None:
        """Write the state file; a full disk is survived."""
        with self.lock:
            try:
                self.state.save(self.run_dir)
            except OSError as error:
                self.warn_once(
                    "disk:state",
                    f"{self.run_dir / states.FILE_NAME} cannot be written ({error.strerror}): a resumed run will send "
                    f"some records twice; free some space.",
                )

    def _loop(self) -> None:
        wait, longest = self._retry_s
        while True:
            stopping = self._stopping
            try:
                self.sync()
                if self.unreachable:
                    self.unreachable = ""
                    self._warned.discard("server")
                    with contextlib.suppress(Exception):
                        self.warn(f"The MLflow server {redact(self.server.uri)} is back, with all that it missed.")
                wait = self._retry_s[0]
                pause = SEND_EVERY_S
            except ServerUnreachableError as error:
                self.unreachable = str(error)
                self.warn_once("server", self._unreachable_sentence())
                pause = wait
                wait = min(2 * wait, longest)
            except Exception as error:  # A bug here must not end training, and must not be silent.
                self.unreachable = f"{type(error).__name__}: {error}"
                self.warn_once("bug", f"The record has a problem of its own ({self.unreachable}); training goes on.")
                pause = longest
            if stopping:
                return
            self._wake.wait(pause)
            self._wake.clear()

    def sync(self) -> None:
        """Send everything that is due, once.

        Raises:
            ServerUnreachableError: the server failed; what was sent so far is noted.
        """
        self.server.connect()
        if not self._checked:
            self._forget_lost_runs()
            self._repair_neighbours()
            self._checked = True
        self._create_runs()
        self._send_statuses()
        self._send_tags_and_params()
        self._send_memory()
        for name in (METRICS, TRACES):
            self._send_journal(name)
        self._send_artifacts()

    def _forget_lost_runs(self) -> None:
        """If the database was deleted since, start over in a new one: everything is still in the journals."""
        run_id = self.state.parent.run_id
        lost = run_id is not None and not self.server.has_run(run_id)
        with self.lock:
            if lost:
                self.state.forget_sent()
            self.state.experiment_id = self.server.experiment_id

    def _repair_neighbours(self) -> None:
        """End the runs of other run directories whose process was killed."""
        found = [p for depth in range(1, 4) for p in self.run_root.glob("*/" * depth + states.FILE_NAME)]
        for path in {*found, *self.run_dir.parent.glob(f"*/{states.FILE_NAME}")}:
            other = None if path.parent == self.run_dir else states.load(path.parent)
            if other is None or other.uri != self.state.uri or not other.writer_is_dead():
                continue
            left = [(run, run.run_id) for run in other.runs.values() if run.sent_status == states.RUNNING]
            for run, run_id in left:
                if run_id is None:
                    continue
                if run.status == states.RUNNING:
                    run.status, run.end_ms = states.KILLED, states.last_sign_ms(path.parent)
                with contextlib.suppress(ServerRefusedError):
                    self.server.set_status(run_id, run.status, run.end_ms)
                run.sent_status = run.status
            if left and other.writer_is_dead():
                try:
                    other.save(path.parent)
                except OSError:
                    continue

    def _create_runs(self) -> None:
        for stage, run in self._runs():
            if run.run_id is not None:
                continue
            tags = dict(run.tags)
            if stage:
                tags["mlflow.parentRunId"] = self.state.parent.run_id or ""
            look_first = run.creating
            with self.lock:
                run.creating = True
            self.save()
            try:
                run_id = self.server.create_run(run.key, run.name, run.start_ms, tags, look_first)
            except ServerRefusedError as error:
                raise ServerUnreachableError(str(error)) from error
            with self.lock:
                run.run_id, run.creating, run.sent_status = run_id, False, states.RUNNING
                for name in tags:
                    run.tags.pop(name, None)
            self.save()
        self._nest_in_sweep()

    def _nest_in_sweep(self) -> None:
        """Tag the parent run with the sweep's run, as soon as that one exists."""
        if not self._sweep_pending or self.state.sweep_dir is None:
            return
        sweep = states.load(Path(self.state.sweep_dir))
        if sweep is not None and sweep.parent.run_id is not None:
            with self.lock:
                self.state.parent.tags["mlflow.parentRunId"] = sweep.parent.run_id
            self._sweep_pending = False

    def _send_statuses(self) -> None:
        for _, run in self._runs():
            with self.lock:
                status, end_ms = run.status, run.end_ms
            if run.run_id is None or status == run.sent_status:
                continue
            try:
                self.server.set_status(run.run_id, status, end_ms)
            except ServerRefusedError as error:
                self._refused(1, str(error))
            with self.lock:
                run.sent_status = status
            self.save()

    def _send_tags_and_params(self) -> None:
        for stage, run in self._runs():
            with self.lock:
                tags = dict(run.tags)
            if tags and run.run_id:
                self._refused(self.server.log_tags(run.run_id, tags), "a tag")
                with self.lock:
                    for name, value in tags.items():
                        if run.tags.get(name) == value:
                            del run.tags[name]
                self.save()
            if not stage and not run.params_sent and run.run_id:
                names = Names()
                params = {names(name): value for name, value in self.state.params.items()}
                try:
                    self._refused(self.server.log_params(run.run_id, params), "a parameter")
                except ServerRefusedError as error:
                    self._refused(1, str(error))
                with self.lock:
                    run.params_sent = True
                self.save()

    def _send_memory(self) -> None:
        while self.memory:
            with self.lock:
                pending = list(self.memory)
            for name in (METRICS, TRACES):
                self._send_records(name, [record for kind, record in pending if kind == name])
            with self.lock:
                for _ in range(min(len(pending), len(self.memory))):
                    self.memory.popleft()

    def _send_journal(self, name: str) -> None:
        while time.monotonic() < self._deadline:
            with self.lock:
                position = self.state.positions.get(name, 0)
            records, following = self.journals[name].read(position)
            if following == position:
                return
            self._send_records(name, records)
            with self.lock:
                self.state.positions[name] = following
            self.save()

    def _send_records(self, name: str, records: list[dict[str, Any]]) -> None:
        if name == TRACES:
            for record in records:
                self._send_trace(record)
            return
        points: dict[str, list[tuple[str, float, int, int]]] = {}
        for record in records:
            stage = self._known_stage(record.get("stage"))
            names = self._names.setdefault(stage, Names())
            for metric, value in record.get("metrics", {}).items():
                point = (names(metric), finite_or_nan(decode_number(value)), int(record["time"]), int(record["step"]))
                points.setdefault(stage, []).append(point)
        for stage, batch in points.items():
            self._refused(self.server.log_metrics(self._run_id(stage), batch), "a metric")

    def _send_trace(self, record: dict[str, Any]) -> None:
        stage = self._known_stage(record.get("stage"))
        try:
            trajectory = record["trajectory"]
            spans = plan_spans(trajectory, record["time"])
            tags = {
                "stage": stage,
                "step": str(record["step"]),
                "task_id": str(trajectory["task_id"]),
                "outcome": str(trajectory["outcome"]),
                "reward": str(trajectory["reward"]),
            }
            identity = trace_id(self.state.runs[stage].key, trajectory["episode_id"], record["step"])
            self.server.log_trace(self._run_id(stage), identity, spans, tags)
        except (ServerRefusedError, KeyError, TypeError, ValueError) as error:
            self._refused(1, f"a trace ({error})")

    def _send_artifacts(self) -> None:
        with self.lock:
            pending = list(self.state.artifacts)
        for entry in pending:
            if time.monotonic() >= self._deadline:
                return
            self._send_artifact(entry)

    def _send_artifact(self, entry: ArtifactEntry) -> None:
        path = Path(entry.path)
        problem = ""
        if not path.exists():
            problem, entry.attempts = f"{path} is not there", MAX_ARTIFACT_ATTEMPTS
        else:
            try:
                self.server.log_artifact(self._run_id(self._known_stage(entry.stage)), path, entry.folder)
            except ServerRefusedError as error:
                problem, entry.attempts = str(error), MAX_ARTIFACT_ATTEMPTS
            except ServerUnreachableError as error:
                # The artifact store may be another machine than the server, and is not to hold up metrics for ever.
                entry.attempts += 1
                if entry.attempts < MAX_ARTIFACT_ATTEMPTS:
                    raise
                problem = str(error)
        if problem:
            self._refused(1, f"the artifact {path.name} ({problem})")
        with self.lock:
            self.state.artifacts.remove(entry)
        self.save()

    def _refused(self, number: int, what: str) -> None:
        if number:
            with self.lock:
                self.state.num_refused += number
            self.warn_once("refused", f"MLflow refused {what}; it stays in {self.run_dir}, and training goes on.")

    def _runs(self) -> list[tuple[str, RunEntry]]:
        with self.lock:
            return list(self.state.runs.items())

    def _run_id(self, stage: str) -> str:
        run_id = self.state.runs[stage].run_id
        if run_id is None:
            # The stage began after this round created its runs: make it up now.
            self._create_runs()
            run_id = self.state.runs[stage].run_id
        return run_id or ""

    def _known_stage(self, stage: str | None) -> str:
        return stage if stage in self.state.runs else ""

    def _statuses_unsent(self) -> bool:
        return any(run.status != run.sent_status for _, run in self._runs())

    def _unreachable_sentence(self) -> str:
        return (
            f"The MLflow server {redact(self.server.uri)} cannot be reached ({self.unreachable}): training goes on, "
            f"records stay in {self.run_dir} and are sent when it is back."
        )
