"""What an agent with a shell may leave behind: a reward each time, whatever it is, and never a failure of the machine.

A failure would take the episode out of the training, so a policy could learn to bring one about where it cannot solve
the task. Beside what does no harm, a right solution is still right.
"""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from composer.contract import SandboxLimits
from composer.rollout.episode import Rubric, run_episode
from composer.rollout.prepare import PreparedTask
from composer.types import Outcome, Split
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tasks.micro import MicroTaskset

TASKSET = MicroTaskset()
MICRO = TASKSET.task(Split.TRAIN, 2)
RIGHT = TASKSET.reference(MICRO)["main.py"]
APART = dataclasses.replace(MICRO, files={**MICRO.files, "tests/test_x.py": b"def test_x(): pass\n"})
PLAIN = b"from main import scale_row\n\n\ndef test_it():\n    assert scale_row(7, 3) == 21\n"
TOGETHER = dataclasses.replace(APART, hidden_tests={"test_hidden.py": PLAIN})


def python(code: str) -> str:
    return f"python3 - <<'END'\nimport os, socket\n{code}\nEND"


def folders(depth: int, name: str) -> str:
    return f"for i in range({depth}):\n    os.mkdir({name}); os.chdir({name})\n"


HARMLESS = {
    "nothing": "true",
    "a package with the server's name": "mkdir composer_serve; touch composer_serve/__init__.py",
    "a folder with the server's file name": "mkdir composer_serve.py; touch composer_serve.py/x",
    "a library with the server's name": "echo > composer_serve.cpython-311-x86_64-linux-gnu.so",
    "the names of what else the grader brings": "mkdir composer_solution.py _report_.py; "
    "touch {composer_solution,_report_}.py/x",
    "a folder for a test": "rm test_main.py; mkdir test_main.py; touch test_main.py/x",
    "a file for the folder of tests": "rm -r tests; echo > tests",
    "a link for the folder of tests": "rm -r tests; ln -s / tests",
    "a folder for the hidden test": "mkdir -p test_hidden.py/a test_hidden; "
    "touch test_hidden.py/a/x test_hidden/__init__.py",
    "a folder for configuration": "mkdir pytest.ini conftest.py; touch pytest.ini/x conftest.py/x",
    "a tree 1500 deep": python(folders(1500, "'d'")),
    "a tree 1500 deep with a file": python(folders(1500, "'d'") + "open('x', 'w')"),
    "a tree of long names": python(folders(15, "'d' * 250") + "open('x', 'w')"),
    "a name of 255 bytes": "touch $(printf 'n%.0s' $(seq 255)).; touch $(printf 'n%.0s' $(seq 255))",
    "names with odd bytes": r"touch $'a\nb' $'\xff\xfe' ' ' ./-rf '*' '\'; mkdir $'\xff d'; touch $'\xff d/\n'",
    "pipes, sockets and devices": "mkfifo pipe helper.py\n"
    + python("socket.socket(socket.AF_UNIX).bind('socket')")
    + "\nmknod null c 1 3; ln -s /dev/zero zero; ln -s /dev/stdin stdin; touch NUL con aux",
    "closed files and folders": "mkdir closed half; touch closed/x half/x secret; "
    "chmod 000 secret closed; chmod 444 half",
    "a closed working directory": "chmod 555 . tests",
    "hard links": "mkdir h; for i in $(seq 200); do ln main.py h/$i; done",
    "loops of links": "ln -s a b; ln -s b a; ln -s . here; ln -s .. up; mkdir l; ln -s ../l l/l; ln -s / root",
    "a sparse terabyte": "truncate -s 1T sparse || truncate -s 20M sparse",
    "3000 files": python("for i in range(3000): open(f'{i}', 'w')"),
    "a background process that makes and removes folders": "(while :; do mkdir -p q/w/e; rm -rf q; done) "
    ">/dev/null 2>&1 &",
    "a fork bomb": "(while :; do sleep 100 & done) >/dev/null 2>&1 &",
    "nobody left": "kill -9 -1",
    "everyone stopped": "(sleep 0.1; kill -STOP -1) & sleep 0.2",
}
HARMFUL = {
    "a tree deeper than a path may be": python(folders(3000, "'d'") + "open('x', 'w')"),
    "a path longer than a path may be": python(folders(25, "'d' * 200") + "open('x', 'w')"),
    "48800 files": python("for i in range(48800): open(str(i), 'w')"),
    "as many folders as there may be": python(
        "try:\n    for i in range(10**6): os.mkdir(str(i))\nexcept OSError: pass"
    ),
    "hard links to much": "head -c 1M /dev/zero > m; for i in $(seq 300); do ln m m$i; done",
    "a full disk": "for f in x y z /tmp/z /dev/shm/z; do cat /dev/zero > $f; done",
    "a sparse file of 64 MB": "truncate -s 64M sparse",
    "no working directory": 'rm -rf "$PWD"',
    "a link for the working directory": 'p=$PWD; cd /; rm -rf "$p"; ln -s / "$p"',
    "a file for the working directory": 'p=$PWD; cd /; rm -rf "$p"; touch "$p"',
    "a working directory that is closed": "chmod 000 .",
    "a pipe for the solution": "rm main.py; mkfifo main.py",
    "a folder for the solution": "rm main.py; mkdir main.py; touch main.py/x",
    "no bytes that are Python": "head -c 100000 /dev/urandom > main.py",
    "nothing at all": "rm -rf * .[a-z]*",
}


class Shell:
    """A harness whose only turn is one command line."""

    tools: dict = {}

    def __init__(self, command: str, is_solved: bool) -> None:
        self.command, self.is_solved = command, is_solved

    def open(self, request, with_prompt=True):
        return SimpleNamespace(turns=[], messages=[], ids=[], metadata={})

    async def run(self, conversation, sandbox, generate, episode_id, clock):
        if self.is_solved:
            await sandbox.write("main.py", RIGHT)
        await sandbox.shell(self.command, 10)
        return Outcome.FINISHED


async def play(backend: BubblewrapBackend, task, command: str, is_solved: bool):
    return await run_episode(
        PreparedTask(task, backend, SandboxLimits(), 1),
        harness=Shell(command, is_solved),
        rubric=Rubric({"pytest": PytestGrader(memoise=False)}),
        generate=None,
        limits=SandboxLimits(),
        timeout_s=100,
        group_id="g",
        episode_id="g/0",
    )


@pytest.fixture(scope="module")
def rewards(runner, backend):
    """Rewards of an episode that solves nothing and of one that solves the task, and why."""

    def run(task, command):
        async def both():
            return await asyncio.gather(*(play(backend, task, command, is_solved) for is_solved in (False, True)))

        episodes = runner.run(both())
        return [t.reward for t in episodes], [(t.outcome, t.error, t.metadata) for t in episodes]

    return run


@pytest.mark.parametrize("name", list(HARMLESS))
def test_what_does_no_harm_changes_no_reward(rewards, name):
    found, why = rewards(APART, HARMLESS[name])
    assert found == [0.0, 1.0], why


@pytest.mark.parametrize("name", [name for name in HARMLESS if " for " in name or "name" in name])
def test_nor_where_tests_run_in_the_process_of_the_solution(rewards, name):
    found, why = rewards(TOGETHER, HARMLESS[name])
    assert found == [0.0, 1.0], why


@pytest.mark.parametrize("name", list(HARMFUL))
def test_what_cannot_be_graded_is_a_zero_and_no_failure(rewards, name):
    found, why = rewards(APART, HARMFUL[name])
    assert found[0] == 0.0 and found[1] is not None, why
