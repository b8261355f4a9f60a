"""The README's own examples, typed as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from composer.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str, first_words: str) -> str:
    [found] = [
        b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if first_words in b.splitlines()[0]
    ]
    return found


def command(words: str) -> list[str]:
    [line] = [line for line in README.splitlines() if line.startswith("    composer ") and words in line]
    return shlex.split(line)[1:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_your_own_env(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ours").mkdir()
    (folder / "ours" / "env.py").write_text(block("python", "ours/env.py"))
    assert main(command("plugins=[ours]")) == 0, capsys.readouterr()


def test_your_own_mix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_conf" / "mix").mkdir(parents=True)
    (folder / "my_conf" / "mix" / "ours.yaml").write_text(block("yaml", "mix/ours.yaml"))
    assert main(["plan", *command("--config-dir my_conf")]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.startswith("tiny_moe-ours-")


@pytest.mark.parametrize("line", re.findall(r"^    composer (.*)  #", README, re.MULTILINE))
def test_what_can_be_changed(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned instead of run; what the others find is this machine's affair."""
    words = [word for word in shlex.split(line) if word not in ("plan", "doctor", "audit", "tasks", "check")]
    assert main(["plan", *words]) == 0, capsys.readouterr()


def test_the_short_quickstart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = re.findall(r'^    make quickstart ARGS="(.*)"$', README, re.MULTILINE)
    assert main(["plan", *shlex.split(line)]) == 0, capsys.readouterr()


def test_the_helps_examples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    examples = re.findall(
        r"^  composer (?:plan )?(.*)", capsys.readouterr().out.partition("Examples:")[2], re.MULTILINE
    )
    assert len(examples) == 3
    for line in examples:
        assert main(["plan", *shlex.split(line)]) == 0, capsys.readouterr()
    assert f"composer plan {examples[1]} " in README, "both spell it alike"


def test_tab_completion(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = re.findall(r'^    eval "\$\((composer .*)\)"', README, re.MULTILINE)
    monkeypatch.setattr("sys.argv", ["composer"])
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion composer")


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_what_is_linked_is_there(path: str) -> None:
    assert (Path(__file__).parents[2] / path).exists()
