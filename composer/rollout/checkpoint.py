"""What an episode leaves on disk: checkpoints from which it goes on, and the files that its agent ended with.

    <folder>/open/<group>/<number>/turn-<n>.json    the conversation after n turns
                                   turn-<n>.state   the sandbox's files then (`SandboxBackend.save`)
                                   done.json        the trajectory of one that has ended, until its siblings have too
    <folder>/states/<group>.<number>.state          the files at the end, which `composer look` opens

A run that was killed starts its unfinished groups again under their old names: their episodes then go on from here.
What ran in a sandbox is not in a snapshot: a shell begins anew in the directory where it was, without its variables.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer.contract import Sandbox, SandboxBackend, Snapshot
from composer.errors import SandboxError
from composer.rollout.chat import Conversation
from composer.rollout.harness import Generate
from composer.rollout.prepare import PreparedTask
from composer.types import Generation, Outcome, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """Where an episode goes on."""

    conversation: dict[str, Any]
    """As of `Conversation.to_dict`."""
    directory: str
    """Of the shell."""
    kept_by_tools: dict[str, list[dict[str, Any]]]
    """By tool name, what `Tool.final` gave."""
    state: Path


@dataclass(frozen=True)
class Keeping:
    """What the episodes of a run leave behind; as it is, nothing."""

    folder: Path = Path()
    every_turns: int = 0
    """Turns between two checkpoints of an episode; 0: none is written."""
    state_share: float = 0.0
    """Of the episodes, those whose final files are kept: chosen by their names."""

    def of(self, episode_id: str) -> EpisodeFiles:
        """Those of one episode, `<group>/<number>`."""
        chosen = zlib.crc32(episode_id.encode()) < self.state_share * 2**32
        state = self.folder / "states" / f"{episode_id.replace('/', '.')}.state" if chosen else None
        return EpisodeFiles(self.folder / "open" / episode_id, self.every_turns, state)

    def forget(self, group_id: str) -> None:
        """All episodes of a group have ended, and go on record elsewhere. Raises nothing."""
        if self.every_turns:
            shutil.rmtree(self.folder / "open" / group_id, ignore_errors=True)


class EpisodeFiles:
    """The files of one episode. Trouble with them is logged and never ends it."""

    def __init__(self, folder: Path, every_turns: int, state: Path | None) -> None:
        """See `Keeping.of`."""
        self.folder, self.every_turns, self.state = folder, every_turns, state
        self._kept_at = 0

    async def start(self, task: PreparedTask, conversation: Any, tools: Mapping[str, Any]) -> Sandbox:
        """The agent's sandbox: as it was at the last checkpoint, whose conversation then goes on; else a fresh one.

        Raises:
            SandboxError, SandboxStartError, TaskError: as of `PreparedTask.start`.
        """
        checkpoint = self._last() if self.every_turns and isinstance(conversation, Conversation) else None
        if checkpoint is None:
            return await task.start()
        try:
            sandbox = await task.start_from(checkpoint.state)
        except (OSError, SandboxError) as error:
            logger.warning("Episode %s begins anew, since its checkpoint cannot be started: %s", self._name, error)
            return await task.start()
        try:
            conversation.resume(checkpoint.conversation)
            for name, items in checkpoint.kept_by_tools.items():
                tools[name].restore(sandbox, items)
            await sandbox.shell(f"cd -- {shlex.quote(checkpoint.directory)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("Episode %s begins anew, since its checkpoint is of another env: %r", self._name, error)
            await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
            self._kept_at = 0
            return await task.start()
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
            raise
        return sandbox

    def watching(
        self,
        generate: Generate,
        conversation: Any,
        sandbox: Sandbox,
        backend: SandboxBackend,
        tools: Mapping[str, Any],
    ) -> Generate:
        """`generate`, with a checkpoint before it where one is due: then all that was said has been done."""
        if not self.every_turns or not isinstance(conversation, Conversation):
            return generate

        async def generate_from_here(token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
            if len(conversation.turns) >= self._kept_at + self.every_turns:
                await self._keep(conversation, sandbox, backend, kept_by_tools(tools, sandbox))
            return await generate(token_ids, max_tokens=max_tokens, episode_id=episode_id)

        return generate_from_here

    async def keep_state(self, sandbox: Sandbox, backend: SandboxBackend) -> None:
        """Keep the files that the agent has ended with, if those of this episode are to be kept."""
        if self.state is None:
            return
        try:
            self.state.parent.mkdir(parents=True, exist_ok=True)
            await save_state(sandbox, backend, self.state)
        except (OSError, SandboxError) as error:
            logger.warning("The final files of episode %s are not kept: %s", self._name, error)

    async def _keep(
        self, conversation: Conversation, sandbox: Sandbox, backend: SandboxBackend, kept_by_tools: Mapping[str, Any]
    ) -> None:
        """Write one, and remove the one before it."""
        number = len(conversation.turns)
        self._kept_at = number  # also if it fails: the next turn is not the time to try again
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            where = (await sandbox.shell("pwd")).output.decode(errors="surrogateescape").rstrip("\n")
            await save_state(sandbox, backend, self.folder / f"turn-{number}.state")
            fields = {
                "conversation": conversation.to_dict(),
                "directory": where,
                "kept_by_tools": dict(kept_by_tools),
            }
            _write(self.folder / f"turn-{number}.json", fields)
        except (OSError, SandboxError) as error:
            # If it is the sandbox that failed, the agent's next command says so.
            logger.warning("No checkpoint of episode %s after %d turns: %s", self._name, number, error)
            return
        for older in self.folder.glob("turn-*"):
            if older.stem != f"turn-{number}":
                older.unlink(missing_ok=True)

    def _last(self) -> Checkpoint | None:
        """The newest whole one, if there is any."""
        found = [(int(p.stem.removeprefix("turn-")), p) for p in self.folder.glob("turn-*.json")]
        for number, path in sorted(found, reverse=True):
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                checkpoint = Checkpoint(**fields, state=path.with_suffix(".state"))
            except (OSError, ValueError, TypeError) as error:
                logger.warning("The checkpoint of episode %s at %s cannot be read: %s", self._name, path, error)
                continue
            if checkpoint.state.exists():
                self._kept_at = number
                return checkpoint
        return None

    def end(self, trajectory: Trajectory) -> None:
        """The episode has ended: keep its trajectory while its siblings go on, unless it has to be tried again."""
        if not self.every_turns or trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / "done.json", trajectory.to_dict())
        except (OSError, TypeError, ValueError) as error:
            logger.warning("Episode %s has ended, which cannot be written down: %s", self._name, error)
            return
        for path in self.folder.glob("turn-*"):
            path.unlink(missing_ok=True)

    def ended(self) -> Trajectory | None:
        """The trajectory, if the episode has ended already."""
        path = self.folder / "done.json"
        if not self.every_turns:
            return None
        try:
            return Trajectory.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("What episode %s ended with, at %s, cannot be read: %s", self._name, path, error)
            return None

    @property
    def _name(self) -> str:
        return "/".join(self.folder.parts[-2:])


async def save_state(sandbox: Sandbox, backend: SandboxBackend, path: Path) -> None:
    """Write a sandbox's files as they are now to a file, whole or not at all.

    Raises:
        OSError: there is no room, or the file cannot be written.
        SandboxError: the sandbox failed.
    """
    snapshot: Snapshot = await sandbox.snapshot()
    try:
        await backend.save(snapshot, path)
    finally:
        await backend.drop(snapshot)


def kept_by_tools(tools: Mapping[str, Any], sandbox: Sandbox) -> dict[str, list[dict[str, Any]]]:
    """What tools have kept for the episode, by their names: a to-do list, for one."""
    kept = {name: tool.final(sandbox) for name, tool in tools.items() if hasattr(tool, "final")}
    return {name: [asdict(item) for item in items] for name, items in kept.items() if items}


def _write(path: Path, fields: dict[str, Any]) -> None:
    half = path.with_suffix(".tmp")
    with half.open("w", encoding="utf-8") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
