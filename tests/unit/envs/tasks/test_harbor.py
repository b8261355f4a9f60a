"""Folders of Harbor and of Terminal-Bench, and how they are graded; with real programs in plain folders."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from composer.errors import ConfigError, TaskError
from composer.types import Split
from envs.grading.command_grader import CommandGrader, Recipe
from envs.tasks.harbor import HarborTaskset

sys.path.insert(0, str(Path(__file__).parent))
from image_stand_in import ImageBackend  # noqa: E402

HARBOR = {
    "task.toml": '[metadata]\ndifficulty = "easy"\nmade = 2025-01-02\n[verifier]\ntimeout_sec = 120.0\n',
    "instruction.md": "Write hello.txt.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "tests/test_state.py": "x\n",
    "solution/solve.sh": "echo hello > hello.txt\n",
    "solution/data.txt": "d\n",
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: Write hello.txt.\ndifficulty: easy\nmax_test_timeout_sec: 60\nparser_name: pytest\n",
    "Dockerfile": "FROM scratch\n",
    "docker-compose.yaml": "services: {}\n",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "x\n",
    "solution.sh": "echo hello > hello.txt\n",
}


def write(folder: Path, files: dict[str, str | None]) -> Path:
    for path, content in files.items():
        if content is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
    return folder


def load(root: Path) -> HarborTaskset:
    return HarborTaskset(str(root), evaluation_share=0.0)


def test_a_folder_of_harbors(tmp_path):
    folder = write(tmp_path / "set" / "hello", HARBOR)
    taskset = load(tmp_path)
    task = taskset.task(Split.TRAIN, 0)
    assert task.id == "harbor/train/set/hello"
    assert task.request == "Write hello.txt."
    assert task.files == {}
    assert task.image == f"dockerfile:{folder}/environment/Dockerfile"
    assert task.hidden_tests == {"test.sh": HARBOR["tests/test.sh"].encode(), "test_state.py": b"x\n"}
    assert (task.metadata["difficulty"], task.metadata["made"]) == ("easy", "2025-01-02")
    assert Recipe.of(task) == Recipe(
        command="mkdir -p /logs/verifier && bash /tests/test.sh",
        report="reward",
        report_path="/logs/verifier/reward.txt",
        hidden_folder="/tests",
        restores_tests=False,
        timeout_s=120.0,
    )
    files, command = taskset.solver(task)
    assert files == {"/solution/solve.sh": HARBOR["solution/solve.sh"].encode(), "/solution/data.txt": b"d\n"}
    assert command == "bash /solution/solve.sh"


def test_a_folder_of_terminal_benchs(tmp_path):
    folder = write(tmp_path / "hello", TERMINAL_BENCH)
    taskset = load(tmp_path)
    task = taskset.task(Split.TRAIN, 0)
    assert (task.id, task.request) == ("harbor/train/hello", "Write hello.txt.")
    assert task.image == f"dockerfile:{folder}/Dockerfile"
    assert sorted(task.hidden_tests) == ["run-tests.sh", "test_outputs.py"]
    assert task.metadata["difficulty"] == "easy"
    recipe = Recipe.of(task)
    assert recipe.command == "TEST_DIR=/tests bash /tests/run-tests.sh"
    assert (recipe.report, recipe.hidden_folder, recipe.timeout_s) == ("pytest", "/tests", 60.0)
    solution = {"/solution/solution.sh": b"echo hello > hello.txt\n"}
    assert taskset.solver(task) == (solution, "bash /solution/solution.sh")


def test_an_image_by_name_and_no_solution(tmp_path):
    toml = '[environment]\ndocker_image = "acme/hello:1"\n'
    changes = {"task.toml": toml, "environment/Dockerfile": None, "solution/solve.sh": None, "solution/data.txt": None}
    write(tmp_path / "hello", {**HARBOR, **changes})
    taskset = load(tmp_path)
    task = taskset.task(Split.TRAIN, 0)
    assert task.image == "acme/hello:1" and taskset.solver(task) is None
    assert Recipe.of(task).timeout_s == 0.0


@pytest.mark.parametrize(
    ("files", "change", "message"),
    [
        (HARBOR, {"task.toml": "["}, "task.toml cannot be read ("),
        (HARBOR, {"task.toml": "verifier = 3"}, "task.toml: verifier=3 is no table"),
        (HARBOR, {"task.toml": "[verifier]\ntimeout_sec = -1"}, "its tests' timeout -1 is no number of seconds"),
        (HARBOR, {"task.toml": "[environment]\ndocker_image = 1"}, "task.toml: environment.docker_image=1 is no text"),
        (HARBOR, {"instruction.md": None}, "instruction.md cannot be read (No such file"),
        (HARBOR, {"instruction.md": "\n"}, "instruction.md is empty"),
        (HARBOR, {"tests/test.sh": None}, "tests/test.sh is missing"),
        (HARBOR, {"environment/Dockerfile": None}, "environment/Dockerfile is missing, and no image is named"),
        (HARBOR, {"environment/docker-compose.yaml": ""}, "tasks of several containers"),
        (HARBOR, {"steps/1/instruction.md": ""}, "tasks of several steps"),
        (TERMINAL_BENCH, {"task.yaml": "- a"}, "task.yaml must hold keys and values, and holds ['a']"),
        (TERMINAL_BENCH, {"task.yaml": "difficulty: easy"}, "task.yaml has no text `instruction`"),
        (
            TERMINAL_BENCH,
            {"task.yaml": "instruction: x\nparser_name: swebench"},
            "task.yaml: parser_name='swebench' must",
        ),
        (TERMINAL_BENCH, {"run-tests.sh": None}, "run-tests.sh is missing"),
        (TERMINAL_BENCH, {"Dockerfile": None}, "Dockerfile is missing, and no image is named"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_that_names_the_folder(tmp_path, files, change, message):
    folder = write(tmp_path / "hello", {**files, **change})
    with pytest.raises(TaskError, match="^" + re.escape(f"Task folder {folder}: {message}")) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_links_that_lead_out_are_refused(tmp_path):
    (tmp_path / "secret").write_text("s")
    folder = write(tmp_path / "tasks" / "hello", TERMINAL_BENCH)
    for name in ("run-tests.sh", "tests/test_outputs.py"):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(TaskError, match=r"is a symbolic link that leads out of"):
            load(tmp_path / "tasks").task(Split.TRAIN, 0)
        (folder / name).unlink()
        (folder / name).write_text("x")


def test_a_folder_without_tasks(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"env\.taskset\.args\.path="):
            load(path)


def test_the_graders_verdict(tmp_path):
    check = '[ "$(cat hello.txt)" = hello ] && echo 1 > "$ROOT"/logs/verifier/reward.txt\n'
    write(tmp_path / "hello", {**HARBOR, "tests/test.sh": check})
    task = load(tmp_path).task(Split.TRAIN, 0)
    # The stand-in has its root elsewhere.
    grading = dict(task.metadata["grading"])
    grading["command"] = re.sub("(?= /)", ' "$ROOT"', grading["command"]).replace('" /', '"/')
    task.metadata["grading"] = grading
    backend = ImageBackend({task.image: {"README": b"r"}})

    def score(files):
        return asyncio.run(CommandGrader().grade(task, files, backend)).score

    assert score({"README": b"r"}) == 0.0
    assert score({"README": b"r", "hello.txt": b"hello\n"}) == 1.0


def test_no_dockerfile_leads_out_of_its_task(tmp_path):
    """The folder that it leads to would be sent to the engine, and lie before the agent."""
    outside = write(tmp_path / "outside", {"Dockerfile": "FROM scratch\nCOPY . /\n", "secret": "x"})
    folder = write(tmp_path / "tasks" / "hello", {**HARBOR, "environment/Dockerfile": None})
    (folder / "environment").mkdir(exist_ok=True)
    (folder / "environment" / "Dockerfile").symlink_to(outside / "Dockerfile")
    with pytest.raises(TaskError, match="environment/Dockerfile is a symbolic link that leads out of it"):
        HarborTaskset(str(tmp_path / "tasks"))
