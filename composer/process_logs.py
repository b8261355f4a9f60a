"""What a process of a run prints, and why it had to end itself: files in the run directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def log_to(run_dir: Path, name: str) -> None:
    """Send all that this process and its children print to `<run_dir>/logs/<name>.log`."""
    folder = run_dir / "logs"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.log").open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def last_words(run_dir: Path, name: str) -> Path:
    """Where a process that has to end itself leaves the reason."""
    return run_dir / "logs" / f"{name}.last-words"
