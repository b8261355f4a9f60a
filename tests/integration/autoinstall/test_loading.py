"""Sandboxes and tasks that start from an environment, on both backends."""

from __future__ import annotations

import asyncio

import pytest

from composer.autoinstall.pipeline import Ended
from composer.contract import SandboxLimits
from composer.errors import ConfigError, SandboxStartError, TaskError
from composer.rollout.episode import Rubric
from composer.rollout.taskcheck import CheckSettings, check_taskset
from composer.types import Split
from envs.grading.command_grader import CommandGrader
from envs.sandbox.docker.backend import DockerBackend
from envs.sandbox.installed import InstalledEnvironments
from envs.tasks.bug_injection import BugInjectionTaskset
from envs.tasks.feature_deletion import FeatureDeletionTaskset
from envs.tasks.installed import InstalledTaskset
from tests.integration.autoinstall.conftest import LIMITS, Pipeline
from tests.integration.autoinstall.repositories import BANKGATE, CALC, CALC_COMMANDS, SHOP, SHOP_COMMANDS, write_files

SCRIPTS = {
    "proposer": [[("propose", {"commands": SHOP_COMMANDS[:3]})]],
    "installer": [
        [("shell", {"command": "python3 make_settings.py 25"})],
        [("write_file", {"path": "bankgate.py", "content": BANKGATE})],
        [
            (
                "submit",
                {
                    "mocks": {"bankgate.py": "the bank's client"},
                    "generated": ["settings.ini"],
                    "variables": {"SHOP_CURRENCY": "EUR", "QUOTED": "it's $HOME"},
                },
            )
        ],
    ],
}


@pytest.fixture(scope="module")
def environment(runner, backend, tmp_path_factory):
    """The folder of an environment for the shop."""
    folder = tmp_path_factory.mktemp("made")
    pipeline = Pipeline(runner, backend, folder / "environments")
    result = pipeline.run(write_files(folder / "shop", SHOP), SCRIPTS)
    assert result.ended is Ended.INSTALLED
    return pipeline.environment(result)


@pytest.fixture(scope="module")
def installed(runner):
    backend = InstalledEnvironments("test-installed")
    yield backend
    runner.run(backend.close())


def lines(result) -> list[str]:
    return result.output.decode().splitlines()


def test_a_sandbox_has_the_environment_and_not_the_repository(runner, installed, environment):
    async def look():
        sandbox = await installed.start({"a.py": b"print(1)\n"}, LIMITS, image=f"environment:{environment}")
        try:
            names = lines(await sandbox.exec(["find", ".", "-type", "f"]))
            held = lines(await sandbox.exec(["sh", "-c", "grep -rl 'return sum(prices)' /home /tmp /var/tmp"]))
            variables = lines(await sandbox.exec(["sh", "-c", 'echo "$SHOP_CURRENCY"; echo "$QUOTED"']))
            own = lines(await sandbox.exec(["sh", "-c", "echo $SHOP_CURRENCY"], env={"SHOP_CURRENCY": "USD"}))
            shell = [
                lines(await sandbox.shell(c))
                for c in ('echo "$SHOP_CURRENCY $QUOTED"', "SHOP_CURRENCY=YEN", "(exit 3)")
            ]
            last = await sandbox.shell("echo $SHOP_CURRENCY")
            copy = await sandbox.fork()
            forked = lines(await copy.exec(["sh", "-c", "echo $SHOP_CURRENCY; cat a.py"]))
            await copy.stop()
            return names, held, variables, own, shell[0], lines(last), forked
        finally:
            await sandbox.stop()

    names, held, variables, own, shell, last, forked = runner.run(look())
    assert sorted(names) == ["./a.py", "./bankgate.py", "./settings.ini"]
    assert held == []
    assert variables == ["EUR", "it's $HOME"] and own == ["USD"]
    assert shell == ["EUR it's $HOME"] and last == ["YEN"]
    assert forked == ["EUR", "print(1)"]


def test_snapshots_are_loaded_again_after_the_backend_began_anew(runner, installed, environment):
    async def once():
        sandbox = await installed.start({}, LIMITS, image=f"environment:{environment}")
        seen = lines(await sandbox.shell("cat settings.ini; echo $SHOP_CURRENCY"))
        await sandbox.stop()
        return seen

    first = runner.run(once())
    runner.run(installed.inside.close())
    assert runner.run(once()) == first == ["[shop]", "fee = 25", "EUR"]


def test_other_sandboxes_are_those_of_the_backend_inside(runner, installed):
    async def once():
        sandbox = await installed.start({"a": b"x"}, LIMITS)
        seen = lines(await sandbox.shell("ls; echo ${SHOP_CURRENCY-none}"))
        await sandbox.stop()
        return seen

    assert runner.run(once()) == ["a", "none"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is no record of an installed environment"),
        ("[]", "is no record of an installed environment"),
        ("{outcome: dropped, variables: {}}", "its outcome is 'dropped'"),
        ("{outcome: installed, variables: {'a b': x}}", "its variables are no texts"),
        ("{outcome: installed, variables: {A: 1}}", "its variables are no texts"),
        ("{outcome: installed, variables: {}}", "its snapshot cannot be loaded (No such file or directory)"),
    ],
)
def test_what_is_no_environment_does_not_start(runner, installed, tmp_path, record, said):
    if record is not None:
        (tmp_path / "environment.yaml").write_text(record)
    with pytest.raises(SandboxStartError, match="environment") as error:
        runner.run(installed.start({}, SandboxLimits(), image=f"environment:{tmp_path}"))
    assert said in str(error.value)


def test_a_damaged_snapshot_does_not_start(runner, installed, environment, tmp_path):
    (tmp_path / "environment.yaml").write_bytes((environment / "environment.yaml").read_bytes())
    (tmp_path / "snapshot").write_bytes((environment / "snapshot").read_bytes()[:1000])
    with pytest.raises(SandboxStartError, match="no saved snapshot"):
        runner.run(installed.start({}, SandboxLimits(), image=f"environment:{tmp_path}"))


def test_a_backend_inside_has_to_be_one():
    with pytest.raises(ValueError, match="must be one of bubblewrap, docker"):
        InstalledEnvironments("x", backend="podman")


def check(runner, backend, taskset):
    rubric = Rubric({"tests": CommandGrader(memory_bytes=2**30)})
    settings = CheckSettings(num_tasks=20, rounds=2, concurrency=2, limits=LIMITS)
    return runner.run(asyncio.wait_for(check_taskset(taskset, rubric, backend, settings), 240))


@pytest.mark.slow
def test_features_and_bugs_of_the_repository_are_tasks(runner, installed, environment):
    """Also by the other tasksets themselves, which take any image."""
    image = f"environment:{environment}"
    repository = str(environment / "repository")
    features = check(runner, installed, FeatureDeletionTaskset(repository, image=image, evaluation_share=0.5))
    assert features.ok and len(features.tasks) == 6
    bugs = check(runner, installed, BugInjectionTaskset(repository, image=image, evaluation_share=0.5))
    assert len(bugs.tasks) >= 6 and sum(task.verdict == "ok" for task in bugs.tasks) >= len(bugs.tasks) - 2
    # Without the environment none of it can be solved.
    bare = check(runner, installed, FeatureDeletionTaskset(repository, evaluation_share=0.5))
    assert {str(task.verdict) for task in bare.tasks} == {"broken reference"}


def test_the_taskset_of_environments(environment, tmp_path, caplog):
    parent = environment.parent
    all_of_them = InstalledTaskset(str(parent), evaluation_share=0.5)
    one = InstalledTaskset(str(environment), evaluation_share=0.5)
    ids = {all_of_them.task(split, i).id for split in Split for i in range(len(all_of_them.keys(split)))}
    assert ids == {one.task(split, i).id for split in Split for i in range(len(one.keys(split)))}
    assert len(ids) == 6 and f"installed/train/{environment.name}/shop/orders.py::total" in ids
    task = one.task(Split.TRAIN, 0)
    assert task.image == f"environment:{environment}" and task.metadata["environment"] == environment.name
    feature = task.metadata["file"]
    assert b"raise NotImplementedError" in task.files[feature]
    assert one.reference(task)[feature] == SHOP[feature].encode()
    # A repository without Python tests is left out, and named.
    calc = tmp_path / "all" / "calc-1"
    write_files(calc / "repository", CALC)
    (calc / "environment.yaml").write_text("{}")
    (tmp_path / "all" / environment.name).symlink_to(environment)
    mixed = InstalledTaskset(str(tmp_path / "all"), kind="bug_injection")
    assert len({key.partition("/")[0] for split in Split for key in mixed.keys(split)}) == 1
    assert "calc-1 has no bug_injection tasks" in caplog.text
    for path, kind, said in (
        (str(calc), "feature_deletion", "there is no Python file in it"),
        (str(tmp_path / "nowhere"), "feature_deletion", "name an environment's folder"),
        (str(parent), "feature", "must be one of feature_deletion, bug_injection"),
    ):
        with pytest.raises(ConfigError, match=said):
            InstalledTaskset(path, kind)
    with pytest.raises(TaskError, match=r"give env\.taskset\.args\.path one that `composer autoinstall` made"):
        InstalledTaskset().task(Split.TRAIN, 0)


@pytest.mark.docker
@pytest.mark.slow
def test_docker_from_a_bare_repository_to_tasks(tmp_path, docker_engine, docker_image):  # noqa: F811
    arguments = {"image": docker_image, "host": docker_engine}
    with asyncio.Runner() as runner:
        backend = DockerBackend("test-autoinstall", **arguments)
        try:
            pipeline = Pipeline(runner, backend, tmp_path / "environments")
            result = pipeline.run(write_files(tmp_path / "shop", SHOP), SCRIPTS)
            assert (result.ended, result.reason) == (Ended.INSTALLED, "in 1 try, its script leads there again")
            cheating = [
                [("shell", {"command": "mkdir -p ~/.local/bin && printf '#!/bin/sh\\n' > ~/.local/bin/python3"})],
                [("shell", {"command": "/bin/chmod +x ~/.local/bin/python3"})],
                [("submit", {"variables": {"PATH": "/home/dev/.local/bin:/usr/bin:/bin"}})],
            ]
            commands = [
                {**c, "command": c["command"].replace("python3", "~/.local/bin/python3")} for c in SHOP_COMMANDS
            ]
            script = {"proposer": [[("propose", {"commands": commands})]], "installer": cheating}
            cheat = pipeline.run(write_files(tmp_path / "cheated", SHOP), script, tries=1)
            assert cheat.ended is Ended.DROPPED
            lacked = " ".join(pipeline.record(cheat)["tries"][0]["lacked"])
            assert "the program '~/.local/bin/python3' would be /home/dev/.local/bin/python3, which no" in lacked
            assert "these variables may not be set: PATH" in lacked
        finally:
            runner.run(backend.close())
        loaded = InstalledEnvironments("test-installed", backend="docker", args=arguments)
        try:
            taskset = InstalledTaskset(str(pipeline.environment(result)), evaluation_share=0.0)
            done = check(runner, loaded, taskset)
            found = [(str(t.verdict), t.reason) for t in done.tasks if t.split is Split.TRAIN]
            assert found == [("ok", "")] * 6
        finally:
            runner.run(loaded.close())


def test_calc_is_no_python_repository_and_has_no_tasks(runner, backend, tmp_path):
    pipeline = Pipeline(runner, backend, tmp_path / "environments")
    script = {
        "proposer": [[("propose", {"commands": CALC_COMMANDS})]],
        "installer": [
            [("shell", {"command": "sed s/@BASE@/10/ config.h.in > config.h"})],
            [("submit", {"generated": ["config.h"]})],
        ],
    }
    result = pipeline.run(write_files(tmp_path / "calc", CALC), script)
    assert result.ended is Ended.INSTALLED
    with pytest.raises(ConfigError, match="there is no Python file in it"):
        InstalledTaskset(str(pipeline.environment(result)))
