"""Siblings that start from one prepared state, in real sandboxes."""

import asyncio
import dataclasses

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, TaskError
from composer.rollout.prepare import PreparedTask, prepared
from composer.types import Task
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.bubblewrap import BubblewrapBackend

LIMITS = SandboxLimits()
# Each run of the setup leaves a line; what it makes lies in the repository and beside it.
SETUP = "echo made > built.txt; mkdir -p ~/.cache/tool; date +%s%N >> ~/.cache/tool/times; rm secret.txt"
TASK = Task("t/train/0", "", {"main.py": b"1\n", "secret.txt": b"answer"}, {}, setup=SETUP)
LARGE = Task("t/train/1", "", {f"{i}.txt": b"x" for i in range(300)}, {})


def play(coroutine, **arguments):
    async def run():
        backend = BubblewrapBackend("prepare", profile="plain", **arguments)
        try:
            return await coroutine(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


async def look(sandbox, command: str) -> str:
    return (await sandbox.shell(command)).output.decode()


def test_the_setup_runs_once_for_all_siblings_and_graders() -> None:
    async def scenario(backend) -> None:
        async with prepared(TASK, backend, LIMITS, 3) as state:
            siblings = await asyncio.gather(*(state.start() for _ in range(3)))
            seen = {await look(s, "ls; cat ~/.cache/tool/times") for s in siblings}
            assert len(seen) == 1
            listing, _, time = seen.pop().strip().rpartition("\n")
            assert listing.split() == ["built.txt", "main.py"]
            # Nobody sees what another does.
            await siblings[0].write("main.py", b"2\n")
            assert await siblings[1].read("main.py") == b"1\n"
            grading = await state.backend.start({"main.py": b"2\n"}, dataclasses.replace(LIMITS, num_processes=9))
            # The machine is the agent's; the files are those that are graded, and no others.
            assert await look(grading, "ls; cat main.py ~/.cache/tool/times") == f"main.py\n2\n{time}\n"
        assert backend._snapshots is not None and not backend._snapshots._chains
        for sandbox in (*siblings, grading):
            await sandbox.stop()

    play(scenario)


def test_a_state_that_vanished_is_prepared_once_more() -> None:
    async def scenario(backend) -> None:
        async with prepared(TASK, backend, LIMITS, 2) as state:
            await state.start()
            await backend.drop(await state.base())
            siblings = await asyncio.gather(*(state.start() for _ in range(3)))
            [_] = {await look(s, "cat ~/.cache/tool/times") for s in siblings}
            for each in (state.base, state.bare):
                await backend.drop(await each())
            grading = await state.backend.start({"main.py": b"2\n"}, LIMITS)
            assert await look(grading, "ls; ls ~/.cache/tool") == "main.py\ntimes\n"
        assert backend._snapshots is not None and not backend._snapshots._chains

    play(scenario)


def test_equal_solutions_of_siblings_are_graded_once() -> None:
    tests = {"test_it.py": b"from main import x\n\n\ndef test_it():\n    assert x == 1\n"}
    task = dataclasses.replace(TASK, files={"main.py": b"x = 0\n", "secret.txt": b""}, hidden_tests=tests)

    async def scenario(backend) -> None:
        grader = PytestGrader()
        async with prepared(task, backend, LIMITS, 3) as state:
            for _ in range(3):
                assert (await grader.grade(task, {"main.py": b"x = 1\n"}, state.backend)).score == 1.0
            assert (await grader.grade(task, {"main.py": b"x = 2\n"}, state.backend)).score == 0.0
        assert grader.num_runs == 2
        # Another task may have another setup: nothing is remembered for it.
        async with prepared(task, backend, LIMITS, 3) as another:
            await grader.grade(task, {"main.py": b"x = 1\n"}, another.backend)
        assert grader.num_runs == 3

    play(scenario)


def test_an_only_child_needs_no_snapshot() -> None:
    async def scenario(backend) -> None:
        async with prepared(TASK, backend, LIMITS) as state:
            assert await look(await state.start(), "cat built.txt") == "made\n"
            assert backend._snapshots is not None and not backend._snapshots._chains

    play(scenario)


def test_many_files_are_written_once() -> None:
    async def scenario(backend) -> None:
        async with prepared(LARGE, backend, LIMITS, 2) as state:
            first, second = await state.start(), await state.start()
            assert await look(first, "ls | wc -l") == await look(second, "ls | wc -l") == "300\n"
            assert len(backend._snapshots._chains) == 1
            assert state.backend is backend  # without a setup, graders bring all files along

    play(scenario)


def test_a_setup_that_fails_fails_every_sibling_and_runs_once() -> None:
    failing = dataclasses.replace(TASK, setup="echo no such package >&2; exit 7")

    async def scenario(backend) -> None:
        async with prepared(failing, backend, LIMITS, 3) as state:
            results = await asyncio.gather(*(state.start() for _ in range(3)), return_exceptions=True)
        assert [str(r) for r in results] == [
            "the setup of task t/train/0 ended with exit code 7 (no such package): mend it, or the task's image"
        ] * 3
        assert all(isinstance(r, TaskError) for r in results)
        assert next(backend._numbers) == 2  # one sandbox was started
        assert not backend._sandboxes

    play(scenario)


def test_no_room_for_the_snapshot_names_the_key() -> None:
    async def scenario(backend) -> None:
        async with prepared(TASK, backend, LIMITS, 2) as state:
            with pytest.raises(SandboxError, match=r"no room for a snapshot of task t/train/0.*snapshot_bytes"):
                await state.start()
        assert not backend._sandboxes

    play(scenario, snapshot_bytes=0)


def test_a_cancelled_start_leaves_nothing() -> None:
    slow = dataclasses.replace(TASK, setup="sleep 60")

    async def scenario(backend) -> None:
        state = PreparedTask(slow, backend, LIMITS, 2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await state.start()
        assert not backend._sandboxes
        await state.close()

    play(scenario)
