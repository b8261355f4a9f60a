"""The command `composer`, also as `python -m composer`.

What it imports takes a second. A signal that ends a run must not come out of an import as a traceback, or be swallowed
by one, so it ends the process at once: nothing has begun yet.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """Run the command of this process; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it, and means it
            signal.signal(number, _end)
    from composer.cli import main as command

    return command()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
