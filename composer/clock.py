"""How long a run takes: the wall time of each of its starts and of the stages in it, in `times.json`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAVE_EVERY_S = 5.0


class Clock:
    """Counts this start and remembers the earlier ones, also those that were killed: all but their last seconds."""

    def __init__(self, path: Path) -> None:
        """Begin a start; nothing is written yet. A file that cannot be read counts as no earlier start.

        Args:
            path: of `times.json`, a list with `{"wall_s": 41.5, "stages": {"rl": 30.2}}` a start.
        """
        self._path = path
        self._earlier: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            self._earlier = [
                {"wall_s": float(start["wall_s"]), "stages": {n: float(s) for n, s in start["stages"].items()}}
                for start in json.loads(path.read_bytes())
            ]
        self._began = time.monotonic()
        self._stage_began: dict[str, float] = {}
        self._stage_ended: dict[str, float] = {}

    @property
    def starts(self) -> list[dict[str, Any]]:
        """All starts so far, this one last."""
        now = time.monotonic()
        stages = {name: self._stage_ended.get(name, now) - began for name, began in self._stage_began.items()}
        return [*self._earlier, {"wall_s": now - self._began, "stages": stages}]

    @property
    def wall_s(self) -> float:
        """Seconds that all starts took together."""
        return sum(start["wall_s"] for start in self.starts)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds that each stage took in all starts together; a stage that never began is left out."""
        total = Counter[str]()
        for start in self.starts:
            total.update(start["stages"])
        return dict(total)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside as part of a stage."""
        self._stage_began[name] = time.monotonic()
        try:
            yield
        finally:
            self._stage_ended[name] = time.monotonic()

    def save(self) -> None:
        """Write `times.json`, whole or not at all; a full disk is no reason to fail a run that is otherwise well."""
        half = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            half.write_text(json.dumps(self.starts), encoding="utf-8")
            half.replace(self._path)

    async def keep_saving(self) -> None:
        """Save every few seconds until cancelled."""
        while True:
            self.save()
            await asyncio.sleep(SAVE_EVERY_S)
