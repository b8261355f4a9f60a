"""Append-only JSON lines in the run directory: the local truth that MLflow is filled from.

One writer, any number of readers. A line is in the file as soon as `append` returns, so a killed process loses nothing
that it had logged. Readers only ever see whole lines.
"""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any


class Journal:
    """One file of JSON lines.

    Example:
        >>> journal = Journal(Path("metrics.jsonl"))                          # doctest: +SKIP
        >>> journal.append({"step": 1, "metrics": {"loss": 2.5}})             # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        """Name the file; it is opened by the first `append`."""
        self.path = path
        self._file: int | None = None
        self._lock = threading.Lock()

    def append(self, record: dict[str, Any]) -> None:
        """Write one line at the end of the file.

        Raises:
            OSError: it could not be written whole (the disk is full, the folder is gone); nothing of it stays.
        """
        line = json.dumps(record, allow_nan=False, default=str, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file is None:
                self._file = self._open()
            size = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, line)
                if written < len(line):
                    raise OSError(28, "No space left on device", str(self.path))
            except OSError:
                os.ftruncate(self._file, size)
                raise

    def _open(self) -> int:
        """Open for appending; a line that a killed process left half written is cut off."""
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(file).st_size
        end = size
        while end and os.pread(file, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(file, end)
        return file

    def read(self, position: int, max_bytes: int = 2**20) -> tuple[list[dict[str, Any]], int]:
        """The whole lines from a byte position on, at least one if there is one.

        Args:
            position: where a line starts, in bytes; a position behind the end starts over at 0.
            max_bytes: read about this much.

        Returns:
            The records and the position after them. Lines that are no JSON are skipped.
        """
        records: list[dict[str, Any]] = []
        left = max_bytes
        try:
            with self.path.open("rb") as file:
                if position > os.fstat(file.fileno()).st_size:
                    position = 0
                file.seek(position)
                while left > 0:
                    line = file.readline()
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    left -= len(line)
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict):
                        records.append(record)
        except FileNotFoundError:
            pass
        return records, position

    def count(self, position: int) -> int:
        """How many whole lines follow a byte position."""
        try:
            with self.path.open("rb") as file:
                file.seek(position)
                return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file. A later `append` opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def encode_number(number: float) -> float | str:
    """A number as JSON allows it: NaN and the infinities become the texts `NaN`, `Infinity`, `-Infinity`."""
    number = float(number)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def decode_number(value: float | str) -> float:
    """The reverse of `encode_number`.

    Raises:
        ValueError: it is no number.
    """
    return float(value)
