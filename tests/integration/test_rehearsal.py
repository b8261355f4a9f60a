"""The expert under limits that are too small, in real sandboxes: which one it is, before anything starts."""

from pathlib import Path

import pytest

from composer.compose import compose
from composer.doctor import EXIT_MISSING, doctor
from composer.errors import ConfigError, CorpusError, PlanError
from composer.rehearsal import check_lengths, rehearse

HUNGRY = """
from composer.types import Split, Task, ToolCall
from composer.errors import TaskError


class Hungry:
    name = "hungry"

    def __init__(self, command, file_bytes=1):
        self.command, self.file_bytes = command, file_bytes

    def task(self, split, index):
        return Task(f"hungry/{split}/{index}", "work", {"data": b"x" * self.file_bytes}, {"test_a.py": b""})

    def expert(self, task, seed):
        if not self.command:
            raise TaskError("hungry has no expert")
        return [ToolCall("run", {"command": self.command}), ToolCall("finish", {})]
"""


def hungry(folder: Path, command: str, *overrides: str, file_bytes: int = 1) -> list[str]:
    (folder / "hungry.py").write_text(HUNGRY)
    return [
        "plugins=[hungry]",
        "env.taskset._target_=hungry.Hungry",
        "~env.taskset.args",
        f"+env.taskset.args={{command: {command!r}, file_bytes: {file_bytes}}}",
        "+env.tools.run={_target_: envs.tools.shell.Run}",
        *overrides,
    ]


def test_the_quickstart_gets_through() -> None:
    assert rehearse(compose()) == []
    assert rehearse(compose(["stages=[pretrain]"])) == []
    assert rehearse(compose(["stages=[pretrain]", "~mix.phases.sft", "env.max_turns=1"])) == [], "nothing plays"


@pytest.mark.parametrize(
    ("command", "file_bytes", "overrides", "key"),
    [
        ("true", 2**14, ["env.limits.file_bytes=4096"], "env.limits.file_bytes"),
        ("true", 2**22, ["env.limits.disk_bytes=2097152"], "env.limits.disk_bytes"),
        (
            "python3 -c \"b = b'x' * 200000000\"",
            1,
            ["env.limits.memory_bytes=67108864", "env.limits.disk_bytes=1048576"],
            "env.limits.memory_bytes",
        ),
        ("python3 -c 'import threading as t, time; [t.Thread(target=time.sleep, args=[1]).start() for _ in range(8)]'",
         1, ["env.limits.num_processes=4"], "env.limits.num_processes"),
        ("python3 -c 'import time; [0 for _ in iter(lambda: time.process_time() > 2, True)]'", 1,
         ["env.limits.cpu_seconds=1"], "env.limits.cpu_seconds"),
        ("sleep 1", 1, ["env.episode_timeout_s=0.5"], "env.episode_timeout_s"),
    ],
    ids=["file", "disk", "memory", "processes", "cpu", "time"],
)  # fmt: skip
def test_a_limit_that_is_too_small_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file_bytes: int, overrides: list[str], key: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match=r"hungry/train/0.*the expert gets through") as caught:
        rehearse(compose(hungry(tmp_path, command, *overrides, file_bytes=file_bytes)))
    assert caught.value.key == key


def test_what_fails_anyway_is_not_the_limits_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for command in ("false", ""):  # a command that fails, no expert at all
        assert rehearse(compose(hungry(tmp_path, command, "env.limits.num_processes=4"))) == []


RL_ONLY = ["stages=[evaluate_before,rl]", "model.checkpoint=/somewhere"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["~env.tools.finish"], "`finish` is missing, and the expert of micro ends every episode with it"),
        (["~env.tools.finish", *RL_ONLY], "`finish` is missing, and the expert of micro ends every episode with it"),
        *(
            ([f"~env.tools.{name}"], f"`{name}` is missing, and the expert of micro calls it in the sessions of SFT")
            for name in ("search_replace", "list_dir", "shell")  # the last two on other tasks than the first
        ),
    ],
)
def test_a_missing_tool_is_named(overrides: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose(overrides)
    with pytest.raises(ConfigError, match=sentence + r": add `env\.tools\.\w+` again$") as caught:
        rehearse(config)
    assert caught.value.key == "env.tools"
    assert doctor(config) == EXIT_MISSING
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_a_policy_may_do_without_a_tool_of_the_experts() -> None:
    [warning] = rehearse(compose(["~env.tools.read_file", *RL_ONLY]))
    assert warning.startswith("env.tools: the expert of micro calls `read_file`, which is missing")


@pytest.mark.parametrize(
    "override",
    ["mix.phases.sft.seq_len=64", "generator.max_model_len=64 env.max_turn_tokens=32", "env.max_turn_tokens=8"],
)
def test_too_few_tokens_whatever_the_tokenizer(override: str) -> None:
    with pytest.raises(
        PlanError, match=r"the expert on task micro/train/0 has at least \d+ tokens.*: raise it"
    ) as caught:
        rehearse(compose(override.split()))
    assert caught.value.key == override.partition("=")[0]


def test_the_doctor_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(compose(["mix.phases.sft.seq_len=64"])) == EXIT_MISSING
    said = " ".join(capsys.readouterr().out.split())
    assert "missing limits mix.phases.sft.seq_len=64: the session of the expert" in said
    assert said.endswith("cannot run here yet: limits")


def test_the_doctor_does_not_praise_limits_that_it_could_not_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor(compose(hungry(tmp_path, "false"))) == EXIT_MISSING
    said = " ".join(capsys.readouterr().out.split())
    assert "missing limits could not be tried: on task hungry/train/0, " in said and "gets through" not in said


def test_what_may_be_too_few_is_a_warning() -> None:
    turns, session = rehearse(compose(["env.max_turns=2", "mix.phases.sft.seq_len=144"]))
    assert turns == "env.max_turns=2: the expert takes 4 turns for task micro/train/0"
    assert session.startswith(
        "mix.phases.sft.seq_len=144: the session of the expert on task micro/train/0 probably has"
    )


def test_tokens_that_were_counted() -> None:
    """Three sessions of 20 to 40 tokens, their longest turns of 5 to 9."""
    lengths, turns = [20, 40, 30], [5, 9, 7]

    def check(*overrides: str) -> None:
        check_lengths(compose(["env.max_turn_tokens=5", "generator.max_model_len=20", *overrides]), lengths, turns)

    check("mix.phases.sft.seq_len=40")
    with pytest.raises(CorpusError, match="sft.seq_len=39: the longest session has 40 tokens; start a new run with at"):
        check("mix.phases.sft.seq_len=39")
    with pytest.raises(CorpusError, match="max_model_len=19: even the shortest session has 20 tokens"):
        check("generator.max_model_len=19")
    with pytest.raises(CorpusError, match="max_turn_tokens=4: every session has a turn of at least 5 tokens"):
        check("env.max_turn_tokens=4")
    check("env.max_turn_tokens=4", "stages=[pretrain]")
    check_lengths(compose(["env.max_turn_tokens=4"]), [], [])
