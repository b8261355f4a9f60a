"""Whose sandboxes may ask for a network: agents', as it was when their task was new, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from composer.contract import Grade, SandboxLimits, Snapshot
from composer.rollout import preflight
from composer.rollout.episode import EnvSettings, Rubric
from composer.rollout.prepare import PreparedTask, prepare
from composer.schema import EnvConfig, TargetConfig
from composer.types import Outcome, Task, Trajectory
from envs.grading.command_grader import CommandGrader
from envs.grading.pytest_grader import PytestGrader
from tests.unit.rollout.stand_in import StandInBackend, StandInSandbox

TASK = Task("t", "", {"a.py": b""}, {}, metadata={"created_at": "2024-05-01"})


@dataclass(eq=False)
class Recorder(StandInBackend):
    """Remembers what sandboxes were asked for."""

    limits: list[SandboxLimits] = field(default_factory=list)

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> StandInSandbox:
        self.limits.append(limits)
        return await super().start(files, limits, image=image)

    async def load(self, path: Path) -> Snapshot:
        return Snapshot("1")

    async def drop(self, snapshot: Snapshot) -> None:
        pass


class _Grader:
    name = "grader"

    async def grade(self, task, files, backend, trajectory) -> Grade:
        await backend.start(files, SandboxLimits())
        return Grade(1.0)


def asked(backend: Recorder) -> list[tuple[bool, str]]:
    found, backend.limits = [(each.network, each.packages_before) for each in backend.limits], []
    return found


def test_agents_have_a_network_of_the_tasks_date() -> None:
    backend = Recorder()

    async def use() -> None:
        state = PreparedTask(TASK, backend, SandboxLimits(), 1)  # pyright: ignore[reportArgumentType]
        await state.start()
        await state.start_from(Path("checkpoint"))
        await prepare(TASK, backend, SandboxLimits())  # pyright: ignore[reportArgumentType]

    asyncio.run(use())
    assert asked(backend) == [(True, "2024-05-01")] * 3
    undated = Task("t", "", {}, {})
    asyncio.run(PreparedTask(undated, backend, SandboxLimits(), 1).start())  # pyright: ignore[reportArgumentType]
    assert asked(backend) == [(True, "")]


def test_graders_and_checks_have_none(tmp_path: Path) -> None:
    backend = Recorder()

    async def use() -> None:
        state = PreparedTask(TASK, backend, SandboxLimits(), 1)  # pyright: ignore[reportArgumentType]
        t = Trajectory("t", "g", "g/0", [], [], Outcome.FINISHED, None)
        await Rubric({"grader": _Grader()}).grade(TASK, {}, state.backend, t, 10.0)
        (tmp_path / "secret").write_text("x")
        await preflight.check_sight({tmp_path / "secret": ""}, backend, SandboxLimits())  # pyright: ignore

    asyncio.run(use())
    assert asked(backend) == [(False, ""), (False, "")]
    assert not CommandGrader().limits.network
    assert not PytestGrader().limits.network


def test_a_config_cannot_give_everybody_one() -> None:
    env = EnvConfig("e", TargetConfig("x"), sandbox=TargetConfig("y"))
    assert not EnvSettings.from_config(env, 512).limits.network
