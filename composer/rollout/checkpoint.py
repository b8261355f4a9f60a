"""What an episode leaves on disk: checkpoints from which it goes on, and the files that its agent ended with.

    <folder>/open/<group>/<number>/turn-<n>.json    the conversation after n turns
                                   turn-<n>.state   the sandbox's files then (`SandboxBackend.save`)
                                   watch.json       what the monitor noted before the first turn
                                   done.json        the trajectory of one that has ended
    <folder>/states/<group>.<number>.state          the files at the end, which `composer look` opens

Each stage has a folder of its own. A run that was killed starts its unfinished groups again under their old names:
their episodes then go on from here, or begin anew where anything of a checkpoint is missing or does not fit. Whoever
starts a group forgets its files when it is on record elsewhere, and not before. What ran in a sandbox is not in a
snapshot: a shell begins anew in the directory where it was, without its variables.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer.contract import Sandbox, SandboxBackend, Snapshot
from composer.errors import ResumeError, SandboxError
from composer.monitor.watch import Watch
from composer.rollout.conversation import Conversation
from composer.rollout.deadline import not_counted
from composer.rollout.harness import Generate
from composer.rollout.prepare import PreparedTask
from composer.types import Generation, Outcome, Trajectory, Turn

logger = logging.getLogger(__name__)

_MOST_S = 120.0
"""That an episode's checkpoints may take together. They do not count for the agent, but for the sandbox's life."""


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
    oldest_version: int = 0
    """What older weights than these have generated is not gone on from: it would be too stale to be trained on."""

    def of(self, episode_id: str) -> EpisodeFiles:
        """Those of one episode, `<group>/<number>`."""
        chosen = zlib.crc32(episode_id.encode()) < self.state_share * 2**32
        state = self.folder / "states" / f"{episode_id.replace('/', '.')}.state" if chosen else None
        return EpisodeFiles(self.folder / "open" / episode_id, self.every_turns, state, self.oldest_version)

    def forget(self, group_id: str) -> None:
        """A group is on record elsewhere, or given up. Raises nothing."""
        if self.every_turns:
            shutil.rmtree(self.folder / "open" / group_id, ignore_errors=True)

    def sweep(self, going_on: Container[str] = ()) -> None:
        """Forget all groups but those that go on: who was killed could not. Raises nothing."""
        if self.folder == Path():
            return
        for group in (self.folder / "open").glob("*"):
            if group.name not in going_on:
                shutil.rmtree(group, ignore_errors=True)


class EpisodeFiles:
    """The files of one episode. Trouble with them is logged and never ends it."""

    def __init__(self, folder: Path, every_turns: int, state: Path | None, oldest_version: int = 0) -> None:
        """See `Keeping.of`."""
        self.folder, self.every_turns, self.state, self.oldest_version = folder, every_turns, state, oldest_version
        self._kept_at = 0
        self._goes_on = False
        self._taken_s = 0.0
        """By checkpoints so far."""

    async def start(
        self, task: PreparedTask, conversation: Any, tools: Mapping[str, Any], watch: Watch | None = None
    ) -> Sandbox:
        """The agent's sandbox: as it was at the last checkpoint, whose conversation then goes on; else a fresh one.

        Raises:
            SandboxError, SandboxStartError, TaskError: as of `PreparedTask.start`.
        """
        if not self._writes(conversation):
            return await task.start()
        for path in sorted(self.folder.glob("turn-*.json"), key=_number, reverse=True):
            try:
                sandbox = await self._go_on(path, task, conversation, tools, watch)
            except Exception as error:  # of a file, a tool or a backend: none of them is worth the episode
                why = str(error) if isinstance(error, OSError | SandboxError | ResumeError) else repr(error)
                logger.warning("Episode %s cannot go on after %d turns: %s", self._name, _number(path), why)
            else:
                self._kept_at, self._goes_on = _number(path), True
                logger.info("Episode %s goes on after %d turns", self._name, self._kept_at)
                return sandbox
        sandbox = await task.start()
        # They are of another life of this episode; until here, the next start could still have used them.
        if not self._remove_checkpoints():
            self.every_turns = 0
        return sandbox

    async def _go_on(
        self,
        path: Path,
        task: PreparedTask,
        conversation: Conversation,
        tools: Mapping[str, Any],
        watch: Watch | None,
    ) -> Sandbox:
        """Restore a checkpoint: all of it, or nothing that the episode would notice.

        Raises:
            Exception: whatever came out of what was read, of a tool or of the backend.
        """
        checkpoint = Checkpoint(**json.loads(path.read_text(encoding="utf-8")), state=path.with_suffix(".state"))
        turns = map(Turn.from_dict, checkpoint.conversation["turns"])
        self._check_age(min((v for turn in turns for v in turn.generation.policy_versions), default=None))
        noted = json.loads((self.folder / "watch.json").read_text(encoding="utf-8")) if watch is not None else {}
        sandbox = await task.start_from(checkpoint.state)
        try:
            for name, items in checkpoint.kept_by_tools.items():
                tools[name].restore(sandbox, items)
            try:
                await sandbox.enter(checkpoint.directory)
            except FileNotFoundError:
                raise ResumeError(f"its shell was in {checkpoint.directory!r}, which is not there any more") from None
            # What cannot be taken back comes last.
            if watch is not None:
                watch.resume(noted)
            conversation.resume(checkpoint.conversation)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
            raise
        return sandbox

    async def begin(self, watch: Watch, sandbox: Sandbox, conversation: Any) -> None:
        """The monitor's `Watch.begin`, before an episode that does not go on; and what it has noted is kept.

        Raises:
            SandboxError: the sandbox failed.
        """
        if self._goes_on:
            return
        await watch.begin(sandbox)
        if not self._writes(conversation):
            return
        try:
            await asyncio.to_thread(self._write, "watch.json", watch.to_dict())
        except OSError as error:
            logger.warning("Episode %s will not go on if it is interrupted: %s", self._name, error)

    def _writes(self, conversation: Any) -> bool:
        """Whether there are checkpoints: an agent's own program cannot be stopped and started again."""
        return self.every_turns > 0 and isinstance(conversation, Conversation)

    def _check_age(self, version: int | None) -> None:
        """Refuse what was generated by weights that are too old; `version` is that of the oldest token, if any."""
        if version is not None and version < self.oldest_version:
            raise ResumeError(
                f"it holds tokens of version {version} of the weights, and those before {self.oldest_version} would be "
                "too stale to be trained on (algorithm.max_staleness)"
            )

    def watching(
        self,
        generate: Generate,
        conversation: Any,
        sandbox: Sandbox,
        backend: SandboxBackend,
        tools: Mapping[str, Any],
    ) -> Generate:
        """`generate`, with a checkpoint before it where one is due: then all that was said has been done."""
        if not self._writes(conversation):
            return generate

        async def generate_from_here(token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
            if len(conversation.turns) >= self._kept_at + self.every_turns and self._taken_s < _MOST_S:
                began = time.monotonic()
                with not_counted():
                    await self._keep(conversation, sandbox, backend, kept_by_tools(tools, sandbox))
                self._taken_s += time.monotonic() - began
                if self._taken_s >= _MOST_S:
                    logger.warning("Episode %s has no further checkpoints: these took too long", self._name)
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
            where = await sandbox.directory()
            await save_state(sandbox, backend, self.folder / f"turn-{number}.state")
            fields = {
                "conversation": conversation.to_dict(),
                "directory": where,
                "kept_by_tools": dict(kept_by_tools),
            }
            self._write(f"turn-{number}.json", fields)
        except (OSError, SandboxError, TypeError, ValueError) as error:  # what a tool keeps may be no JSON
            # If it is the sandbox that failed, the agent's next command says so.
            logger.warning("No checkpoint of episode %s after %d turns: %s", self._name, number, error)
            return
        self._remove(path for path in self.folder.glob("turn-*") if path.stem != f"turn-{number}")

    def end(self, trajectory: Trajectory) -> None:
        """The episode has ended: keep its trajectory while its siblings go on, unless it has to be tried again."""
        if not self.every_turns or trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR:
            return
        try:
            self._write("done.json", trajectory.to_dict())
        except (OSError, TypeError, ValueError) as error:
            logger.warning("Episode %s has ended, which cannot be written down: %s", self._name, error)
            return
        self._remove_checkpoints()

    def ended(self) -> Trajectory | None:
        """The trajectory, if the episode has ended already."""
        path = self.folder / "done.json"
        if not self.every_turns or not path.exists():
            return None
        try:
            trajectory = Trajectory.from_dict(json.loads(path.read_text(encoding="utf-8")))
            self._check_age(trajectory.oldest_policy_version if trajectory.num_generated_tokens else None)
        except (OSError, ValueError, KeyError, TypeError, ResumeError) as error:
            logger.warning("Episode %s is played again; what it ended with cannot be used: %s", self._name, error)
            return None
        return trajectory

    def _remove_checkpoints(self) -> bool:
        return self._remove((*self.folder.glob("turn-*"), self.folder / "watch.json"))

    def _remove(self, paths: Iterable[Path]) -> bool:
        """Whether all of them are gone."""
        try:
            for path in paths:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("Files of episode %s cannot be removed: %s", self._name, error)
            return False
        return True

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        """Write a file: whole or not at all.

        Raises:
            OSError: it cannot be written.
            TypeError, ValueError: `fields` are no JSON.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        half = self.folder / f"{name}.tmp"
        with half.open("w", encoding="utf-8") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        half.replace(self.folder / name)

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


def _number(path: Path) -> int:
    """Of a checkpoint, the turns that it holds; 0 if it is none of ours."""
    number = path.stem.removeprefix("turn-")
    return int(number) if number.isdecimal() else 0
