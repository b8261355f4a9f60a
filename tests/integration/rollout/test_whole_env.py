"""All of it at once, on either backend: an installed environment behind a pool, one prepared state for a group and its
graders, checkpoints, final states, and the monitor. The environment's variable is to be seen wherever anything runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from composer.contract import SandboxBackend, SandboxLimits, Snapshot
from composer.monitor.watch import Monitor
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout.chat import Chat, format_calls, install_template
from composer.rollout.checkpoint import Keeping
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.rollout.pool import PoolSettings, SandboxPool
from composer.rollout.prepare import prepared
from composer.rollout.pressure import PressureLimits
from composer.schema import MonitorConfig
from composer.types import Generation, Group, Outcome, Task, ToolCall
from envs.grading.command_grader import CommandGrader, Recipe
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend
from envs.sandbox.installed import InstalledEnvironments
from envs.tasks.micro import MicroTaskset
from envs.tools.finish import Finish
from envs.tools.shell import Run

REPO = Path(__file__).parents[3]
ANY = PressureLimits(runnable_per_cpu=1e9, memory_bytes=0, disk_bytes=0)
LIMITS = SandboxLimits()
LOOK = "echo $SHOP_CURRENCY $(cat ~/installed.txt) $(wc -l < ~/setup.txt) $(cat price.py)"
TURNS = [
    ToolCall("run", {"command": LOOK}),
    ToolCall("run", {"command": "echo 'fee = \"EUR\"' > price.py"}),
    ToolCall("run", {"command": LOOK}),
    ToolCall("finish", {}),
]


@dataclass(frozen=True)
class Kind:
    """A backend, as `env.sandbox.args` of `env=installed` say it."""

    name: str
    raw: Callable[[], SandboxBackend]
    args: dict[str, Any]

    def installed(self) -> InstalledEnvironments:
        """A fresh one, as another process would have it."""
        return InstalledEnvironments("whole", self.name, self.args)


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "bubblewrap":
        return Kind("bubblewrap", lambda: BubblewrapBackend("made"), {})
    args = {"image": request.getfixturevalue("docker_image"), "host": request.getfixturevalue("docker_engine")}
    return Kind("docker", lambda: DockerBackend("made", **args), args)


@pytest.fixture(scope="module")
def environment(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `composer autoinstall` leaves one."""
    folder = tmp_path_factory.mktemp("environment")

    async def make() -> None:
        backend = kind.raw()
        try:
            sandbox = await backend.start({}, LIMITS)
            await sandbox.shell("echo installed > ~/installed.txt")
            await backend.save(await sandbox.snapshot(), folder / "snapshot")
        finally:
            await backend.close()

    asyncio.run(make())
    (folder / "environment.yaml").write_text("outcome: installed\nvariables: {SHOP_CURRENCY: EUR}\n")
    return folder


@pytest.fixture(scope="module")
def task(environment: Path) -> Task:
    test = b"import os, price\n\ndef test_fee():\n    assert price.fee == os.environ['SHOP_CURRENCY'] == 'EUR'\n"
    recipe = Recipe(command="test $SHOP_CURRENCY = EUR && python3 -m pytest -q test_price.py", report="pytest")
    return Task(
        "t/train/0",
        "the fee is of the shop's currency",
        {"price.py": b"fee = 0\n"},
        {"test_price.py": test},
        image=f"environment:{environment}",
        setup="test $SHOP_CURRENCY = EUR && echo once >> ~/setup.txt",
        metadata=recipe.to_metadata(),
    )


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(asyncio.tasks.__file__).read_text()], 512, folder)
    install_template(folder, "compact")
    return Chat.load(folder)


class Killed(BaseException):
    """Stands for the end of the process."""


def play(kind: Kind, chat: Chat, task: Task, keeping: Keeping, until: int = 99) -> Group:
    """One group of three in a process of its own; it ends before the turn `until`."""

    async def policy(token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
        number = chat.decode(token_ids).count("<|im_start|>assistant") - 1
        if number == until:
            raise Killed
        ids = [*chat.encode_generated(format_calls(chat.template, [TURNS[number]])), chat.end_token_id]
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    async def run() -> Group:
        backend = SandboxPool(kind.installed(), PoolSettings(warm=1, pressure=ANY))
        env = Env(
            EnvSettings(max_turns=9, max_model_len=8192, limits=LIMITS, episode_timeout_s=240.0),
            chat=chat,
            taskset=MicroTaskset(),
            tools=[Run(), Finish()],
            rubric=Rubric({"tests": CommandGrader()}),
            backend=backend,
            monitor=Monitor(MonitorConfig(enabled=True), 0),
        )
        try:
            return await env.run_group(task, "g", 3, policy, keeping=keeping)
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def states(kind: Kind, chat: Chat, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that a group has left, which was interrupted and went on."""
    folder = tmp_path_factory.mktemp("kept")
    keeping = Keeping(folder, every_turns=1, state_share=1.0)
    with pytest.raises(BaseExceptionGroup) as killed:
        play(kind, chat, task, keeping, until=2)
    assert killed.group_contains(Killed)
    assert list(folder.glob("open/g/*/turn-2.state"))
    group = play(kind, chat, task, keeping)
    for trajectory in group.trajectories:
        assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.FINISHED, 1.0, "")
        seen = [turn.observation.strip() for turn in trajectory.turns]
        # One setup for all of them; what the agent had done before the end is there after it.
        assert seen[0] == "EUR installed 1 fee = 0" and seen[2] == 'EUR installed 1 fee = "EUR"'
        assert "monitor" in trajectory.metadata and "failed" not in trajectory.metadata["monitor"]
    yield folder / "states"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_its_graders_and_what_is_left_of_it(kind: Kind, states: Path, task: Task) -> None:
    names = sorted(path.name for path in states.iterdir())
    assert names == ["g.0.state", "g.1.state", "g.2.state"]  # nothing half written

    async def look() -> tuple[list[str], str, str]:
        backend = kind.installed()
        seen = []
        try:
            async with prepared(task, backend, LIMITS, 2) as state:
                sandbox = await state.start_from(states / names[0])
                copy = await sandbox.fork()
                again: Snapshot = await copy.snapshot()
                for one in (sandbox, copy, await backend.start({}, LIMITS, base=again), await state.start()):
                    seen.append((await one.shell(LOOK)).output.decode().strip())
                bare = await state.backend.start({}, LIMITS)
                direct = await bare.exec(["sh", "-c", "echo $SHOP_CURRENCY; ls"])
                await backend.drop(again)
                plain = await backend.start({}, LIMITS)
                none = await plain.exec(["sh", "-c", "echo ${SHOP_CURRENCY-none}"])
        finally:
            await backend.close()
        assert not backend._variables and not backend._loaded
        return seen, direct.output.decode(), none.output.decode()

    seen, bare, none = asyncio.run(look())
    assert seen == ['EUR installed 1 fee = "EUR"'] * 3 + ["EUR installed 1 fee = 0"]
    assert bare == "EUR\n" and none == "none\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_composer_look_has_the_variables(kind: Kind, states: Path, tmp_path: Path) -> None:
    args = "".join(f", {name}: '{value}'" for name, value in kind.args.items())
    words = [
        "env=installed",
        f"env.sandbox.args.backend={kind.name}",
        f"+env.sandbox.args.args={{profile: developer{args}}}",
        f"look.state={states / 'g.1.state'}",
        "look.command='env | grep ^SHOP; cat ~/installed.txt price.py'",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "composer", "look", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, 'SHOP_CURRENCY=EUR\ninstalled\nfee = "EUR"\n'), done.stderr
