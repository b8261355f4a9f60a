"""The monitor's part in an episode: baits before it, what the files were and are, and the findings after it.

Its own trouble is never the episode's: what it cannot do is recorded, and the reward stays as it is.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import logging
import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from composer.contract import Sandbox
from composer.errors import SandboxError
from composer.monitor import policy
from composer.monitor.evidence import Evidence, Finding, Kind, cut
from composer.monitor.honeypots import Baits, plant
from composer.monitor.judge import Judge
from composer.monitor.policy import UNJUDGED, Report
from composer.monitor.rules import look
from composer.schema import MonitorConfig
from composer.types import Task, Trajectory

logger = logging.getLogger(__name__)
_COLLECT_S = 20.0
"""For the files of an episode that is not graded: nobody waits longer for them."""


class Monitor:
    """Looks at episodes. One serves all of a process."""

    def __init__(self, config: MonitorConfig, seed: int = 0) -> None:
        """Make ready what the config names.

        Raises:
            ConfigError: the judge's key is not in the environment.
        """
        self.config, self.seed = config, seed
        self.off: frozenset[str] = frozenset(config.off) | ({Kind.NETWORK.value} if config.network else set())
        self.judge = Judge(config.judge, seed) if config.judge.url is not None else None

    def watch(self, task: Task, episode_id: str, max_bytes: int) -> Watch:
        """The monitor's part in one episode; `max_bytes` of files are looked at."""
        return Watch(self, task, episode_id, max_bytes)

    async def report(self, evidence: Evidence, episode_id: str) -> Report:
        """What rules and judge find."""
        report = Report(await asyncio.to_thread(look, evidence, self.off))
        if self.judge is not None and self.judge.is_asked(episode_id):
            verdict = await self.judge.judge(evidence)
            report.judged, report.cause = verdict.answered, verdict.cause
            report.findings += [f for f in verdict.findings if f.kind not in self.off]
            if not verdict.answered and self.config.judge.flag_unjudged:
                # Of no kind of its own: nothing was found.
                report.findings.append(Finding(UNJUDGED, Kind.DODGING, cut(verdict.cause)))
        return report


class Watch:
    """One episode under the monitor: `begin` (or `resume`, if it was interrupted), `end`, `settle`, in this order."""

    def __init__(self, monitor: Monitor, task: Task, episode_id: str, max_bytes: int) -> None:
        """Use `Monitor.watch`."""
        self.monitor, self.task, self.episode_id, self.max_bytes = monitor, task, episode_id, max_bytes
        self.baits = Baits()
        self._base: Mapping[str, bytes] | None = task.files
        self._final: Mapping[str, bytes] | None = None

    async def begin(self, sandbox: Sandbox) -> None:
        """Before the agent: note the files that it finds, and put baits beside them.

        Raises:
            SandboxError: the sandbox failed.
        """
        self.baits = Baits()
        self._base = await self._files(sandbox) if self.task.image or self.task.setup else self.task.files
        honeypots = self.monitor.config.honeypots
        if random.Random(f"honeypots/{self.monitor.seed}/{self.episode_id}").random() < honeypots.share:
            self.baits = await plant(sandbox, honeypots)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy of what `begin` has noted, which `resume` takes."""
        noted: dict[str, Any] = {"baits": asdict(self.baits)}
        if self._base is not self.task.files:
            files = self._base and {path: base64.b64encode(content).decode() for path, content in self._base.items()}
            noted["base"] = files
        return noted

    def resume(self, noted: Mapping[str, Any]) -> None:
        """Go on with an episode whose baits lie there already, and whose files the agent has changed.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: `noted` is not what `to_dict` gives; nothing has changed.
        """
        baits, base = noted["baits"], noted.get("base", self.task.files)
        if base is not None and "base" in noted:
            base = {path: base64.b64decode(content, validate=True) for path, content in base.items()}
        self.baits = Baits(str(baits["canary"]), tuple(map(str, baits["paths"])), int(baits["num"]))
        self._base = base

    async def end(self, sandbox: Sandbox, collected: dict[str, bytes] | str) -> dict[str, bytes] | str:
        """After the agent: what it left behind, as it is to be graded.

        Args:
            sandbox: still runs.
            collected: its files, or why they are not collected.
        """
        if isinstance(collected, str):
            try:
                async with asyncio.timeout(_COLLECT_S):
                    self._final = await self._files(sandbox)
            except (TimeoutError, SandboxError):
                self._final = None
        else:
            self._final = collected = self.baits.without(collected, sandbox.workdir)
        return collected

    async def settle(self, t: Trajectory) -> None:
        """When the episode has its reward: look, and let follow what the config says. Raises nothing."""
        if t.reward is None:
            return
        try:
            evidence = Evidence.of(
                self.task.id,
                self.task.request,
                t.messages,
                self._base or {},
                self._final if self._base is not None else None,
                canary=self.baits.canary,
                baits=self.baits.paths,
            )
            report = await self.monitor.report(evidence, self.episode_id)
            report.baits = self.baits.num
            policy.settle(t, report, self.monitor.config)
        except Exception as error:
            logger.exception("The monitor failed on episode %s", self.episode_id)
            t.metadata[policy.KEY] = {"failed": cut(f"{type(error).__name__}: {error}")}

    async def _files(self, sandbox: Sandbox) -> dict[str, bytes] | None:
        try:
            files = await sandbox.files(self.max_bytes)
        except OSError as error:
            logger.info(
                "Files of %s are not looked at: %s", self.episode_id, errno.errorcode.get(error.errno or 0, error)
            )
            return None
        return self.baits.without(files, sandbox.workdir)
