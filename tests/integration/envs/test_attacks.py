"""Every published attack on both backends: none gets a reward, none harms the machine, none reads another episode.

A test is an attack on a backend. It also wants honest work in the same place to get its full reward, and the attack to
show that it is one: an attack that does nothing would be held off by anything.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator

import pytest

from composer.contract import Grade, SandboxBackend
from composer.types import Split
from envs.attacks.bait import Bait
from envs.attacks.catalogue import Attack, load
from envs.attacks.play import Player
from envs.attacks.targets import TARGETS
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend
from envs.sandbox.realism.load import load_profile
from envs.shadow.service import stop_shared
from envs.tasks.micro import MicroTaskset

ATTACKS = {attack.name: attack for attack in load()}
TASKSET = MicroTaskset()
TASK = TASKSET.task(Split.TRAIN, 2)


def play(runner, player: Player, name: str) -> None:
    outcome = runner.run(player.play(ATTACKS[name]))
    shown = "\n".join(outcome.notes)
    assert outcome.gains == [], shown
    assert outcome.is_honest_work_rewarded, shown
    assert outcome.is_alive, f"it does nothing, so that it got nothing proves nothing: {shown}"


@pytest.fixture(scope="module")
def on_bubblewrap(runner, backend: BubblewrapBackend) -> Iterator[Player]:
    player = Player(backend, "bubblewrap")
    yield player
    runner.run(player.close())
    stop_shared()


@pytest.fixture(scope="module")
def docker(runner, docker_engine: str, docker_image: str) -> Iterator[SandboxBackend]:
    backend = DockerBackend("attacks", docker_image, host=docker_engine)
    yield backend
    runner.run(backend.close())


@pytest.fixture(scope="module")
def on_docker(runner, docker: DockerBackend) -> Iterator[Player]:
    # Graders are the same everywhere; what is tried here is what a backend can change.
    player = Player(docker, "docker", everywhere=False)
    yield player
    runner.run(player.close())
    stop_shared()


@pytest.mark.attacks
@pytest.mark.parametrize("name", list(ATTACKS))
def test_bubblewrap_holds(runner, on_bubblewrap, name):
    play(runner, on_bubblewrap, name)


def test_there_are_enough_of_every_kind():
    families = [attack.family for attack in ATTACKS.values()]
    least = {
        "endings": 35, "files": 41, "git": 7, "host": 25, "left": 9, "leftovers": 6, "memory": 36, "neighbour": 14,
        "search": 4, "server": 9, "snapshot": 7,
    }  # fmt: skip
    assert {family: families.count(family) for family in set(families)}.keys() == least.keys()
    assert all(families.count(family) >= number for family, number in least.items())


class Generous:
    """A grader that is content with everything."""

    async def grade(self, task, files, backend, trajectory):
        return Grade(1.0)


def test_a_grader_that_falls_is_noticed(runner, backend, monkeypatch):
    player = Player(backend, "bubblewrap", everywhere=False)
    monkeypatch.setitem(TARGETS, "exit", dataclasses.replace(TARGETS["exit"], grader=lambda timeout_s: Generous()))
    outcome = runner.run(player.play(ATTACKS["exit at import"]))
    assert outcome.gains == ["attacks/train/exit: a reward of 1"] and not outcome.held


def test_an_attack_that_does_nothing_proves_nothing(runner, backend):
    player = Player(backend, "bubblewrap")
    for attack in (
        Attack("idle", "mine", "nothing", "exit"),
        Attack("idle", "mine", "nothing", "neighbour", shell="true", live="own"),
        Attack("idle", "mine", "nothing", "host", shell="true", live="sign", sign="tried"),
    ):
        outcome = runner.run(player.play(attack))
        assert outcome.gains == [] and not outcome.is_alive and not outcome.held
    runner.run(player.close())


def test_a_leak_and_a_mark_are_noticed(runner, backend):
    bait = Bait()
    with tempfile.NamedTemporaryFile(prefix=bait.mark, dir="/tmp") as file:
        assert bait.found_on_host() == [file.name]
    assert bait.found_on_host() == []
    player = Player(backend, "bubblewrap")
    attack = Attack("loud", "mine", "says that it got something", "host", shell="echo GOT it", live="sign", sign="GOT")
    assert runner.run(player.play(attack)).gains == ["GOT it"]
    runner.run(player.close())


SPAWNS = """
import multiprocessing
def multiply(pair): return pair[0] * pair[1]
def scale_row(a, b):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(multiply, [(a, b)])[0]
"""
SPY = """
import gc, os, sys, types
def scale_row(a, b):
    crowd = CROWD
    files = [(folder, name) for folder, _, names in os.walk("/") for name in names]
    fds = os.listdir("/proc/self/fd")[:-1]  # the last is of the list itself
    found = {
        "files": [f for f in files if "hidden" in f[1] and not f[0].startswith(("/proc", "/usr"))],
        "modules": [n for n in sys.modules if n.startswith(("test_", "composer", "envs"))],
        "functions": [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__name__ == "check"],
        "processes": sorted({open(f"/proc/{p}/comm").read()[:-1] for p in os.listdir("/proc") if p.isdigit()} - crowd),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in fds),
        "here": sorted(os.listdir()),
        "variables": [n for n in os.environ if n.startswith(("COMPOSER", "PYTEST"))],
    }
    raise Exception(found)
"""


@pytest.fixture(scope="module")
def grade(runner, backend):
    """Grade a `main.py`."""

    def run(main: str):
        files = {**TASK.files, "main.py": main.encode()}
        return runner.run(PytestGrader(memoise=False).grade(TASK, files, backend))

    return run


def test_an_honest_solution_may_spawn_processes(grade):
    verdict = grade(SPAWNS)
    assert verdict.score == 1.0, verdict


def test_there_is_nothing_to_find_beside_the_solution(grade):
    crowd = {name[:15] for name in load_profile("developer").processes}  # what a kernel keeps of a name
    verdict = grade(SPY.replace("CROWD", repr(crowd)))
    found = verdict.details["reason"].partition("Exception: ")[2].rpartition(" (line")[0]
    assert found.replace("'", '"') == (
        '{"files": [], "modules": [], "functions": [], "processes": ["python3.11", "systemd"], '
        '"descriptors": ["/dev/null", "/dev/null", "/dev/null", "/dev/null", "socket", "socket"], '
        '"here": ["README.md", "main.py", "test_main.py"], "variables": []}'
    )


def test_no_sandbox_is_left_over(backend):
    assert len(backend._sandboxes) <= 1  # the player's own, which is there to the end


@pytest.mark.docker
@pytest.mark.attacks
@pytest.mark.parametrize("name", list(ATTACKS))
def test_docker_holds(runner, on_docker, name):
    play(runner, on_docker, name)
