"""The one file that talks to MLflow: explicit URIs and run ids, no fluent API, two kinds of failure.

MLflow is imported by the first `connect`, in whichever thread calls it: about 1 CPU-second, and 1.3 more where it has
to create the tables of a new SQLite file (mlflow 3.17.2, measured).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.tracking.names import (
    MAX_METRICS_PER_REQUEST,
    MAX_PARAM_VALUE,
    MAX_PARAMS_PER_REQUEST,
    MAX_TAG_VALUE,
    chunks,
    redact,
    shorten,
    sqlite_path,
)
from composer.tracking.traces import SpanPlan

KEY_TAG = "composer.key"
OPEN_LOCK_S = 60.0
"""Another process that needs longer to open the database is stuck, and waited for no more."""
_REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "NOT_IMPLEMENTED",
    "NOT_FOUND",
    "ENDPOINT_NOT_FOUND",
    "INVALID_STATE",
}


class ServerUnreachableError(Exception):
    """The server does not answer, or cannot do its work at present: try again later."""


class ServerRefusedError(Exception):
    """The server answered, and this request will never do."""


class Server:
    """A tracking server (or database), one experiment of it, and time limits."""

    def __init__(self, uri: str, experiment: str, artifact_location: str | None, timeout_s: float) -> None:
        """Nothing is contacted before `connect`.

        Args:
            uri: `sqlite:///...`, another database, `http(s)://...`.
            experiment: created if it is not there.
            artifact_location: where a new experiment keeps its artifacts; None: the server's own place.
            timeout_s: an HTTP request that is not answered for so long counts as unreachable.
        """
        self.uri = uri
        self.experiment = experiment
        self.artifact_location = artifact_location
        self.timeout_s = timeout_s
        self.experiment_id = ""
        self._client: Any = None

    def connect(self) -> None:
        """Import MLflow, find or create the experiment. Does nothing the second time.

        Raises:
            ServerUnreachableError: nobody answers, or the database cannot be opened.
        """
        if self._client is not None:
            return
        # Read by MLflow at each request. No retries: the caller has its own back-off, and is not to wait for MLflow's.
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, math.ceil(self.timeout_s)))
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
        with self._boundary(), _one_at_a_time(sqlite_path(self.uri)):
            _prepare_sqlite(self.uri, self.timeout_s)
            from mlflow.tracking import MlflowClient

            client = MlflowClient(tracking_uri=self.uri)
            found = client.get_experiment_by_name(self.experiment)
            if found is None:
                try:
                    self.experiment_id = client.create_experiment(self.experiment, self.artifact_location)
                except Exception:
                    # Another run of the same sweep may have been first.
                    found = client.get_experiment_by_name(self.experiment)
                    if found is None:
                        raise
            if found is not None:
                if found.lifecycle_stage == "deleted":
                    client.restore_experiment(found.experiment_id)
                self.experiment_id = found.experiment_id
            self._client = client

    def close(self) -> None:
        """Let go of a database's files, which MLflow would hold to the end of the process. May be used again."""
        # MLflow shares one engine a database within a process: what others are in the middle of goes on.
        store = None if self._client is None else self._client._tracking_client.store
        engine = getattr(store, "engine", None)  # a server at http:// has none
        if engine is not None:
            engine.dispose()

    def create_run(self, key: str, name: str, start_ms: int, tags: Mapping[str, str], look_first: bool) -> str:
        """Create a run.

        Args:
            key: stored as a tag, so that the run can be found again.
            name: shown in the list of runs.
            start_ms: Unix milliseconds.
            tags: further tags.
            look_first: an earlier attempt's answer was lost: take the run with this key if there is one.

        Returns:
            The run's id.

        Raises:
            ServerUnreachableError: no answer; the run may have been created.
            ServerRefusedError: the experiment is gone.
        """
        with self._boundary():
            if look_first:
                found = self._client.search_runs([self.experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
                if found:
                    return found[0].info.run_id
            tags = {name: shorten(value, MAX_TAG_VALUE) for name, value in tags.items()}
            run = self._client.create_run(self.experiment_id, start_ms, {**tags, KEY_TAG: key}, name)
            return run.info.run_id

    def has_run(self, run_id: str) -> bool:
        """Whether a run exists (it does not if its database was deleted meanwhile).

        Raises:
            ServerUnreachableError: no answer.
        """
        try:
            with self._boundary():
                return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except ServerRefusedError:
            return False

    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None:
        """RUNNING, FINISHED, FAILED or KILLED; the last three end the run at `end_ms` (Unix milliseconds).

        Raises:
            ServerUnreachableError: no answer.
            ServerRefusedError: no such run.
        """
        with self._boundary():
            if status == "RUNNING":
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status, end_ms)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> int:
        """Log parameters (cleaned names), in as many requests as needed; the whole of a long value as an artifact.

        Returns:
            How many were refused.

        Raises:
            ServerUnreachableError: no answer; sending all of them again does no harm.
        """
        from mlflow.entities import Param

        refused = 0
        entries = [Param(name, shorten(value, MAX_PARAM_VALUE)) for name, value in params.items()]
        for chunk in chunks(entries, MAX_PARAMS_PER_REQUEST, lambda p: len(p.key) + len(p.value.encode())):
            refused += self._halving(chunk, lambda part: self._client.log_batch(run_id, params=part, synchronous=True))
        for name, value in params.items():
            if len(value) > MAX_PARAM_VALUE:
                with self._boundary():
                    self._client.log_text(run_id, value, f"params/{name}.txt")
        return refused

    def log_tags(self, run_id: str, tags: Mapping[str, str]) -> int:
        """Set tags. Returns and raises as `log_params`."""
        from mlflow.entities import RunTag

        entries = [RunTag(name, shorten(value, MAX_TAG_VALUE)) for name, value in tags.items()]
        return sum(
            self._halving(chunk, lambda part: self._client.log_batch(run_id, tags=part, synchronous=True))
            for chunk in chunks(entries, MAX_PARAMS_PER_REQUEST, lambda t: len(t.key) + len(t.value.encode()))
        )

    def log_metrics(self, run_id: str, points: Sequence[tuple[str, float, int, int]]) -> int:
        """Log metric points (cleaned name, value, Unix milliseconds, step). Equal points are stored once.

        Returns and raises as `log_params`.
        """
        from mlflow.entities import Metric

        entries = [Metric(*point) for point in points]
        return sum(
            self._halving(chunk, lambda part: self._client.log_batch(run_id, metrics=part, synchronous=True))
            for chunk in chunks(entries, MAX_METRICS_PER_REQUEST, lambda m: len(m.key) + 80)
        )

    def log_artifact(self, run_id: str, path: Path, folder: str) -> None:
        """Copy a file to the run's artifacts.

        Raises:
            ServerUnreachableError: no answer, or the artifact store cannot take it at present.
            ServerRefusedError: no such run.
        """
        with self._boundary():
            self._client.log_artifact(run_id, str(path), folder or None)

    def log_trace(self, run_id: str, trace_id: str, spans: Sequence[SpanPlan], tags: Mapping[str, str]) -> None:
        """Write one finished trace that belongs to a run. Sending the same trace again changes nothing.

        Raises:
            ServerUnreachableError: no answer.
            ServerRefusedError: this server cannot store spans (it is older than MLflow 3.4 or keeps plain files).
        """
        from mlflow.entities import Span, TraceInfo, TraceLocation, TraceState
        from mlflow.tracing.client import TracingClient

        root = spans[0]
        with self._boundary():
            # The tracing client below the decorators: it takes an explicit URI and run, and lets errors through,
            # where the exporter behind `MlflowClient.start_trace` logs and swallows them.
            client = TracingClient(self.uri)
            client.start_trace(
                TraceInfo(
                    trace_id=trace_id,
                    trace_location=TraceLocation.from_experiment_id(self.experiment_id),
                    request_time=root.start_ns // 1_000_000,
                    execution_duration=(root.end_ns - root.start_ns) // 1_000_000,
                    state=TraceState.ERROR if root.error else TraceState.OK,
                    request_preview=shorten(json.dumps(root.inputs, default=str), 1000),
                    response_preview=shorten(json.dumps(root.outputs, default=str), 1000),
                    trace_metadata={"mlflow.sourceRun": run_id},
                    tags={"mlflow.traceName": root.name, **{k: shorten(v, 4000) for k, v in tags.items()}},
                )
            )
            entries = [Span.from_dict(_span_dict(trace_id, index, span)) for index, span in enumerate(spans)]
            client.log_spans(self.experiment_id, entries)

    def _halving(self, entries: list[Any], send: Any) -> int:
        """Send; if the request is refused, send its halves, so that one bad entry takes no other with it."""
        try:
            with self._boundary():
                send(entries)
        except ServerRefusedError:
            if len(entries) == 1:
                return 1
            middle = len(entries) // 2
            return self._halving(entries[:middle], send) + self._halving(entries[middle:], send)
        return 0

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """Sort every failure inside into the two kinds."""
        try:
            yield
        except Exception as error:
            reason = _reason(error).replace(self.uri, redact(self.uri))
            refused = getattr(error, "error_code", "") in _REFUSALS or isinstance(error, NotImplementedError)
            raise (ServerRefusedError if refused else ServerUnreachableError)(reason) from error


@contextmanager
def _one_at_a_time(database: Path | None) -> Iterator[None]:
    """Let one process at a time open a database: MLflow fails when two of them create its tables at once."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(database.name + ".lock").open("w") as lock:
        end = time.monotonic() + OPEN_LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.1)
        yield


def _prepare_sqlite(uri: str, timeout_s: float) -> None:
    """Switch the file to write-ahead logging: runs of a sweep and `mlflow ui` then do not lock each other out."""
    path = sqlite_path(uri)
    if path is None:
        return
    connection = sqlite3.connect(path, timeout=timeout_s)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError:
        pass  # Network file systems refuse it; the default journal works there, only slower.
    finally:
        connection.close()


def _span_dict(trace_id: str, index: int, span: SpanPlan) -> dict[str, Any]:
    """A span as `mlflow.entities.Span.from_dict` reads it (hexadecimal ids, attributes as JSON texts)."""
    attributes = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": span.kind,
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        **span.attributes,
    }
    return {
        "trace_id": trace_id,
        "span_id": f"{index + 1:016x}",
        "parent_span_id": None if span.parent is None else f"{span.parent + 1:016x}",
        "name": span.name,
        "start_time_unix_nano": span.start_ns,
        "end_time_unix_nano": span.end_ns,
        "events": [],
        "status": {"code": "ERROR" if span.error else "OK", "message": span.error},
        "attributes": {name: json.dumps(value, default=str) for name, value in attributes.items()},
        "links": [],
    }


def _reason(error: Exception) -> str:
    """The first line of the innermost cause that says something, short."""
    cause: BaseException = error
    while cause.__cause__ is not None or (cause.__context__ is not None and not cause.__suppress_context__):
        following = cause.__cause__ or cause.__context__
        if following is None or not str(following).strip():
            break
        cause = following
    text = str(cause).strip() or str(error).strip() or type(error).__name__
    return shorten(text.splitlines()[0], 200)
