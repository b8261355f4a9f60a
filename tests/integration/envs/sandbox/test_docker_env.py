"""One override moves an env to Docker: episodes and their grading, from each kind of image that conf/ names."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import pytest

from composer.compose import compose
from composer.config import Config
from composer.instantiate import instantiate
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout.chat import Chat, format_calls, install_template
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.types import Generation, Outcome, Split, Task, ToolCall, Trajectory
from envs.sandbox.docker import DockerBackend

pytestmark = pytest.mark.docker

NAME = "composer-tests/by-name:1"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(asyncio.__file__).read_text() * 20], 300, folder)
    install_template(folder, "compact")
    return Chat.load(folder)


@pytest.fixture(scope="module")
def images(
    run: Callable, docker_engine: str, docker_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The same image under a name, from a Dockerfile, and from a tarball."""

    async def imported() -> None:
        backend = DockerBackend("images", docker_image, host=docker_engine)
        try:
            await (await backend.start({}, compose_limits())).stop()
        finally:
            await backend.close()

    run(imported())
    client = docker.APIClient(docker_engine)
    with Path(docker_image.removeprefix("tarball:")).open("rb") as tarball:
        digest = hashlib.file_digest(tarball, "sha256").hexdigest()
    repository, tag = NAME.split(":")
    client.tag(f"composer-image:{digest[:32]}", repository, tag)
    folder = tmp_path_factory.mktemp("context")
    (folder / "Dockerfile").write_text(f"FROM {NAME}\nENV MADE_BY=dockerfile\n")
    yield {"name": NAME, "dockerfile": f"dockerfile:{folder}/Dockerfile", "tarball": docker_image}
    client.remove_image(NAME, force=True)
    client.close()


def compose_limits() -> Any:
    return EnvSettings.from_config(compose([]).env, 1024).limits


def make_env(config: Config, chat: Chat) -> Env:
    """As a run does it."""

    def make(target: Any, key: str, **given: Any) -> Any:
        return instantiate(target, config.plugins, key=key, **given)

    env = config.env
    backend = make(env.sandbox, "env.sandbox", run_label="test")
    taskset = make(env.taskset, "env.taskset", expert_accuracy=1.0, seed=0)
    tools = [make(tool, f"env.tools.{name}") for name, tool in env.tools.items()]
    graders = {name: make(grader, f"env.graders.{name}") for name, grader in env.graders.items()}
    rubric = Rubric(graders, env.grader_weights)
    settings = EnvSettings.from_config(env, 100_000)
    return Env(settings, chat=chat, taskset=taskset, tools=tools, rubric=rubric, backend=backend)


def play(run: Callable, config: Config, chat: Chat, solve: Callable[[Env, Task], Sequence[Any]]) -> Trajectory:
    env = make_env(config, chat)
    assert isinstance(env.backend, DockerBackend)

    async def scenario() -> Trajectory:
        task = env.taskset.task(Split.TRAIN, 0)
        turns = iter(solve(env, task))

        async def policy(token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
            turn = next(turns)
            calls = turn if isinstance(turn, list) else [turn]
            ids = [*chat.encode_generated(format_calls(chat.template, calls)), chat.end_token_id]
            return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

        try:
            return (await env.run_group(task, "g", 1, policy)).trajectories[0]
        finally:
            await env.backend.close()

    return run(scenario())


def composed(docker_engine: str, image: str, *overrides: str) -> Config:
    where = [f"env.sandbox.args.host={docker_engine}", f"env.sandbox.args.image='{image}'"]
    return compose(["+env/sandbox=docker", *where, *overrides])


@pytest.mark.parametrize("kind", ["name", "dockerfile", "tarball"])
def test_micro_from_any_kind_of_image(
    run: Callable, chat: Chat, docker_engine: str, images: dict[str, str], kind: str
) -> None:
    config = composed(docker_engine, images[kind])
    trajectory = play(run, config, chat, lambda env, task: env.taskset.expert(task, 0))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.FINISHED, 1.0, "")
    wrong = [ToolCall("shell", {"command": "sed -i 's/return .*/return 0/' main.py"}), ToolCall("finish", {})]
    assert play(run, config, chat, lambda env, task: wrong).reward == 0.0


def test_coding_with_its_own_look(run: Callable, chat: Chat, docker_engine: str, images: dict[str, str]) -> None:
    config = composed(docker_engine, images["tarball"], "env=coding")
    looks = [ToolCall("shell", {"command": "cat /proc/1/comm ~/.gitconfig; ls"})]

    def solve(env: Env, task: Task) -> list[ToolCall]:
        files = env.taskset.reference(task)
        writes = [ToolCall("write_file", {"path": p, "content": c.decode()}) for p, c in files.items()]
        return [*looks, *writes, ToolCall("finish", {})]

    trajectory = play(run, config, chat, solve)
    assert "systemd" in trajectory.turns[0].observation and "Robin Weber" in trajectory.turns[0].observation
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.FINISHED, 1.0, "")
