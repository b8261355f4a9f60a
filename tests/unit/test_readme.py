"""The README's own examples, typed as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from composer.cli import COMMANDS as COMMAND_WORDS
from composer.cli import main, split_command
from composer.compose import compose
from composer.instantiate import check_targets
from composer.monitor.rules import RULES
from envs.attacks import catalogue

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


# What stands in prose, between backticks: commands, and single overrides. Placeholders stand for something real.
SPANS = list(dict.fromkeys(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))))
COMMANDS = [s for s in SPANS if re.match(r"(composer|python -m) ", s)]
OVERRIDES = [s for s in SPANS if re.fullmatch(r"[+~]?[a-z_]+(\.[a-z_]+)*=[^ ]+( [a-z_.]+=[^ ]+)*", s)]
EXAMPLES = Path(__file__).parents[2] / "envs" / "tasks" / "examples"
ELSEWHERE = {
    "composer resume=<run dir>": "tests/integration/test_quickstart.py, since it needs a run",
    "composer behaviour env-run=<run dir> sessions=<file.jsonl>": "tests/unit/test_behaviour.py: it reads no config",
    "python -m envs.attacks": "tests/integration/envs/test_attacks.py: no command of composer's",
    "composer experiment=agent env=installed env.taskset.args.path=environments/installed":
        "tests/integration/autoinstall/test_command.py: a plan reads the environments that autoinstall made",
}  # fmt: skip
"""Commands that cannot be planned here, and where they are tried."""


HARBOR = {
    f"harbor/{task}/{path}": text
    for task in ("one", "two", "three", "four")
    for path, text in {
        "task.toml": "",
        "instruction.md": "Write hello.txt.",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items()
}


def filled(text: str) -> list[str]:
    harbor = ("<Harbor's folder>", "harbor")
    for placeholder, real in (harbor, ("<folder>", str(EXAMPLES)), ("<head>", "10.0.0.1"), ("<file>", "x.state")):
        text = text.replace(placeholder, real)
    assert "<" not in text, f"{text}: a placeholder without anything that stands for it"
    return shlex.split(text)


def test_commands_in_prose_are_found() -> None:
    assert len(COMMANDS) >= 14 and len(OVERRIDES) >= 12
    assert set(ELSEWHERE) <= set(COMMANDS)
    for reason in ELSEWHERE.values():
        assert (EXAMPLES.parents[2] / reason.partition(",")[0].partition(":")[0]).is_file()


@pytest.mark.parametrize("line", [c for c in COMMANDS if c not in ELSEWHERE])
def test_commands_in_prose(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned as they stand; those that only look at a config have one that composes, with parts that can be made."""
    word, rest = split_command(filled(line)[1:])
    for path, text in HARBOR.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if word in ("run", "plan"):
        assert main(["plan", *rest]) == 0, capsys.readouterr()
        return
    env = [] if word != "autoinstall" or any(r.startswith("env=") for r in rest) else ["env=coding"]
    config = compose([*env, *rest])
    made = check_targets(config)
    for agent in (config.autoinstall.proposer, config.autoinstall.installer) if word == "autoinstall" else ():
        assert {f"env.tools.{tool}" for tool in agent.tools} <= set(made)


@pytest.mark.parametrize("line", OVERRIDES)
def test_overrides_in_prose(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a small run of the env that has all tools, unless they choose another env."""
    assert main(["plan", "experiment=agent", *filled(line)]) == 0, capsys.readouterr()


def test_the_short_quickstart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = re.findall(r'^    make quickstart ARGS="(.*)"$', README, re.MULTILINE)
    assert main(["plan", *shlex.split(line)]) == 0, capsys.readouterr()


def test_the_helps_examples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown, _, examples = capsys.readouterr().out.partition("Examples:")
    lines = [shlex.split(line) for line in re.findall(r"^  composer (.*)", examples, re.MULTILINE)]
    described = set(re.findall(r"^composer ([a-z]+)  ?", shown, re.MULTILINE))
    tried = {split_command(words)[0] for words in lines}
    assert tried == set(COMMAND_WORDS) and tried - {"run"} <= described, "every command has a sentence and an example"
    (folder / "my_tasks").symlink_to(EXAMPLES)
    for word, words in map(split_command, lines):
        if word in ("run", "plan"):
            assert main(["plan", *words]) == 0, capsys.readouterr()
        elif word != "behaviour":
            compose(words)
    assert ["plan", "experiment=composer2"] in lines and "composer plan experiment=composer2 " in README


def test_tab_completion(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = re.findall(r'^    eval "\$\((composer .*)\)"', README, re.MULTILINE)
    monkeypatch.setattr("sys.argv", ["composer"])
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion composer")


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_what_is_linked_is_there(path: str) -> None:
    assert (Path(__file__).parents[2] / path).exists()


TREE = re.search(r"^## The tree\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("package", ["composer", "envs"])
def test_the_tree_has_every_part(package: str) -> None:
    """Modules by their file names, packages by theirs and a slash."""
    assert TREE is not None
    root = Path(__file__).parents[2]
    named = set(re.findall(r"(?<![\w/])([a-z_]+(?:\.py|/))", TREE[1]))
    modules = {p.name for p in (root / package).glob("*.py")} - {"__init__.py", "__main__.py"}
    packages = {f"{p.parent.name}/" for p in (root / package).glob("*/__init__.py")}
    assert modules | packages <= named
    assert all(any((root / p / name).exists() for p in (".", "composer", "envs", "tests")) for name in named)


def test_what_is_counted() -> None:
    """The attacks that `python -m envs.attacks` tries, and the rules of the monitor."""
    assert f"`python -m envs.attacks` tries {len(catalogue.load())} attacks" in README
    assert f"{len(RULES)} rules" in README
