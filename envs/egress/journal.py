"""The log of what sandboxes asked of the network: JSON, a line a request. Trouble with it stops nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.parse
from typing import Any

_LONGEST_URL = 4096


class Journal:
    """One file, opened at the first request."""

    def __init__(self, path: str) -> None:
        """Nothing is opened yet."""
        self._path, self._fd = path, -1
        self.num_lost = 0
        """Lines that could not be written."""

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line. Raises nothing."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            if self._fd < 0:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)  # noqa: PTH103, PTH120
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            if os.write(self._fd, line) != len(line):
                raise OSError("a part of the line was not written")
        except OSError:
            self.num_lost += 1
            self.close()

    def close(self) -> None:
        """Let go of the file. Raises nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def shown_url(scheme: str, host: str, port: int, target: str) -> str:
    """The URL of a request, as the log has it: a query's names, and in place of its values their lengths.

    What was asked for can be seen, and how much went out; a key in it cannot.
    """
    path, mark, query = target.partition("?")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True) if mark else []
    known = "&".join(f"{urllib.parse.quote(name)}=<{len(value)}>" for name, value in pairs)
    where = host if port == (443 if scheme == "https" else 80) else f"{host}:{port}"
    return f"{scheme}://{where}{path}{mark}{known}"[:_LONGEST_URL]


def file_name(label: str, pid: int) -> str:
    """Of a backend's log."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', label)[:60] or 'run'}.{pid}.jsonl"
