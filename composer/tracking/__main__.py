"""`python -m composer.tracking <run_dir> [uri]`: send what a run recorded while its MLflow server was away."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from composer.errors import ComposerError, TrackingError
from composer.tracking import state as states
from composer.tracking.sender import Sender
from composer.tracking.server import Server, ServerUnreachableError

TIMEOUT_S = 30.0


def send(run_dir: Path, uri: str | None = None) -> int:
    """Bring a finished or killed run's record to MLflow.

    Args:
        run_dir: holds `mlflow.json` and the journals.
        uri: the server if it is not the one in `mlflow.json`, or needs a password (which is never stored).

    Returns:
        How many records were missing there before.

    Raises:
        TrackingError: there is no record, its run is still going on, or the server cannot be reached.
    """
    state = states.load(run_dir)
    if state is None:
        raise TrackingError(f"{run_dir}: holds no {states.FILE_NAME}; name the directory of a run.")
    if not state.writer_is_dead() and state.pid != os.getpid():
        raise TrackingError(f"{run_dir}: process {state.pid} still writes it; wait until it ends, it sends by itself.")
    state.end_killed(run_dir)
    sender = Sender(
        run_dir,
        state,
        threading.RLock(),
        Server(uri or state.uri, state.experiment, state.artifact_location, TIMEOUT_S),
        print,
    )
    missing = sender.num_unsent()
    try:
        sender.sync()
    except ServerUnreachableError as error:
        raise TrackingError(f"{state.uri}: cannot be reached ({error}); try again when it is back.") from error
    return missing


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not 1 <= len(arguments) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        missing = send(Path(arguments[0]).absolute(), *arguments[1:])
    except ComposerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{missing} records were missing and have been sent.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
