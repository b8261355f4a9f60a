"""The command in this process. What a run does once it is started is not its part, so a stand-in runs it here."""

import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer.cli import main, split_command
from composer.config import load
from composer.contract import Finding
from composer.errors import MachineError, TrainingError
from composer.rundir import RunDirectory, Status
from composer.schema import Config

Run = Callable[[Config, Any, Path], int]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, and logging as it was before Hydra configured it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path
    for handler in root.handlers:
        if handler not in handlers:
            with contextlib.suppress(OSError):
                handler.close()
    root.handlers, root.level = handlers, level


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Path]]:
    """Stands in for `composer.run.run`: notes what it was given and succeeds."""
    given: list[tuple[Config, Path]] = []

    def run(config: Config, plan: Any, run_dir: Path) -> int:
        given.append((config, run_dir))
        score = {f"average_at_{config.evaluation.samples_per_task}": config.algorithm.learning_rate}
        (run_dir / "summary.json").write_text(json.dumps({"evaluation": {"after": score}}))
        return 0

    stand_in(monkeypatch, run)
    return given


def stand_in(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    module = types.ModuleType("composer.run")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "composer.run", module)


@pytest.mark.parametrize(
    ("argv", "command", "rest"),
    [
        ([], "run", []),
        (["plan", "seed=1"], "plan", ["seed=1"]),
        (["seed=1", "--cfg", "job", "plan"], "plan", ["seed=1", "--cfg", "job"]),
        (["-m", "doctor"], "doctor", ["-m"]),
        (["audit", "env=coding"], "audit", ["env=coding"]),
        (["--config-dir", "x", "tasks", "check", "seed=1"], "tasks", ["--config-dir", "x", "seed=1"]),
        (["--config-name", "plan"], "run", ["--config-name", "plan"]),
        (["pln"], "run", ["pln"]),
    ],
)
def test_the_command_word(argv: list[str], command: str, rest: list[str]) -> None:
    assert split_command(argv) == (command, rest)


@pytest.mark.parametrize("command", [[], ["plan"], ["doctor"], ["-m"]])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+algorithm.gruop_size=4", "did you mean `algorithm.group_size`?"),
        ("algorithm.loss=cliped", "did you mean `clipped`?"),
        ("algorithm.group_size=-1", "at least 2"),
        ("parallel.expert_parallel=3", "must divide model.num_experts"),
        ("env.taskset.args.verbs=3", "has no such argument; did you mean `env.taskset.args.verbs_per_operator`?"),
        ("env.sandbox._target_=os.system", "must begin with one of envs., launchers."),
    ],
)
def test_a_wrong_config_starts_nothing(
    command: list[str],
    override: str,
    message: str,
    own_folder: Path,
    runs: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*command, override]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("composer: ") and "\n" not in error
    assert not runs
    assert not list(own_folder.iterdir())


@pytest.mark.parametrize(
    "argv",
    [["--cfg", "job", "--info", "all"], ["--resolve"], ["--experimental-rerun", "x"], ["--config-dir", "nowhere"]],
)
def test_flags_that_contradict(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("composer: --")


def test_a_run_gets_a_directory_of_its_own(runs: list[tuple[Config, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed=3"]) == 0
    assert main(["seed=3"]) == 0
    (config, first), (_, second) = runs
    assert config.seed == 3
    assert first != second
    assert load(first) == config
    assert config.run_root == str(Path.cwd() / "runs")
    for path in (first, second):
        assert path.is_relative_to(Path.cwd() / "runs")
        assert {"config.yaml", "plan.yaml", "status.json", "composer.log", ".hydra"} <= {p.name for p in path.iterdir()}
        assert RunDirectory(path).status is Status.finished
    assert "- seed=3" in (first / ".hydra" / "overrides.yaml").read_text()
    assert f"run directory: {first}" in capsys.readouterr().out


def test_a_chosen_directory_is_never_overwritten(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hydra.run.dir=it's mine".replace("'", "")]) == 0
    assert main(["hydra.run.dir=its mine"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert len(runs) == 1


def test_a_failed_run_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        (run_dir / "logs").mkdir()
        raise TrainingError("the loss is not finite at step 3: lower the learning rate")

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here"]) == 1
    first, logs, second = capsys.readouterr().err.splitlines()
    assert logs.endswith(str(Path("here").absolute() / "logs"))
    assert first == "composer: the loss is not finite at step 3: lower the learning rate"
    assert "continue with: " in second and second.endswith(f"composer resume={Path('here').absolute()}")
    assert RunDirectory(Path("here")).status is Status.failed


def test_a_run_that_began_nothing_is_not_to_be_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        raise TrainingError("this machine has no disk")

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "composer: this machine has no disk",
        f"composer: nothing was begun; {Path('here').absolute()} is removed",
    ]
    assert not Path("here").exists()
    Path("mine").mkdir()
    assert main(["hydra.run.dir=mine"]) == 1
    assert not list(Path("mine").iterdir()), "it was there before, and empty"
    assert capsys.readouterr().err.endswith(f"; {Path('mine').absolute()} is empty again\n")


def test_an_interrupt_before_anything_was_begun_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        raise KeyboardInterrupt

    stand_in(monkeypatch, run)
    here = Path("here").absolute()
    Path("mine").mkdir()
    for name, left in (("here", "removed"), ("mine", "empty again")):
        assert main([f"hydra.run.dir={name}"]) == 130
        error = f"composer: interrupted before anything was begun; {own_folder / name} is {left}\n"
        assert capsys.readouterr().err == error
    assert not here.exists() and not list(Path("mine").iterdir())

    monkeypatch.setattr("composer.jobs.look_at_sources", lambda config: signal.raise_signal(signal.SIGINT))
    assert main(["hydra.run.dir=here"]) == 130, "before config.yaml is there"
    assert not here.exists()


def test_an_interrupt_after_something_was_begun_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        (run_dir / "mlflow.json").touch()
        raise KeyboardInterrupt

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here"]) == 130
    error = capsys.readouterr().err
    assert error.startswith("composer: interrupted; continue with: ")
    assert error.endswith(f"composer resume={Path('here').absolute()}\n")
    assert RunDirectory(Path("here")).status is Status.interrupted
    assert main(["plan", "resume=here"]) == 0


def test_every_finding_of_the_machine_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from composer.run import check_machine

    found = [Finding("disk", False, "full", "free it"), Finding("gpu", False, "none", required=False)]

    def run(config: Config, plan: Any, run_dir: Path) -> int:
        check_machine([*found, Finding("sandbox", False, "no user namespaces", "allow them")])
        return 0

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here"]) == 3
    assert capsys.readouterr().err.splitlines()[:3] == [
        "composer: this machine lacks what the run needs: disk, sandbox",
        "composer: disk: full -> free it",
        "composer: sandbox: no user namespaces -> allow them",
    ]
    assert not Path("here").exists()


@pytest.mark.parametrize("wrapped", ["bare", "grouped", "chained"])
def test_a_full_disk_under_a_run_is_a_sentence(
    wrapped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        (run_dir / "logs").mkdir()
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if wrapped == "grouped":
            raise ExceptionGroup("tasks", [ValueError("another"), full])
        if wrapped == "chained":
            raise RuntimeError("no result") from full
        raise full

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here"]) == 3
    first, *notes = capsys.readouterr().err.splitlines()
    assert first.startswith("composer: the disk is full: ") and first.endswith("free space and resume")
    assert any("continue with: " in note and "resume=" in note for note in notes)
    assert RunDirectory(Path("here")).status is Status.failed


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        raise ZeroDivisionError("oops")

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "composer: this is a bug of composer's: ZeroDivisionError('oops')" in error
    assert RunDirectory(Path("here")).status is Status.failed


def test_an_interrupted_run_is_resumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    codes, given = [130, 130, 0], []

    def run(config: Config, plan: Any, run_dir: Path) -> int:
        given.append((config, run_dir))
        return codes[len(given) - 1]

    stand_in(monkeypatch, run)
    assert main(["hydra.run.dir=here", "algorithm.num_steps=17"]) == 130
    assert RunDirectory(Path("here")).status is Status.interrupted
    assert main(["resume=here"]) == 130
    assert "nothing differs" in capsys.readouterr().out
    assert main(["resume=here", "algorithm.num_steps=18"]) == 2
    assert main(["resume=here", "algorithm.num_stps=18"]) == 2
    assert main(["-m", "resume=here"]) == 2
    capsys.readouterr()
    assert main(["resume=here", "tracking.timeout_s=3"]) == 0
    assert "tracking.timeout_s: 10.0 -> 3.0" in capsys.readouterr().out
    assert [d for _, d in given] == [Path("here").absolute()] * 3
    assert all(c.algorithm.num_steps == 17 for c, _ in given)
    assert (given[0][0].resume, given[2][0].resume) == (None, str(Path("here").absolute()))
    assert load(Path("here")).tracking.timeout_s == 3.0
    assert main(["resume=here"]) == 2
    assert "finished" in capsys.readouterr().err
    assert "- algorithm.num_steps=17" in (Path("here") / ".hydra" / "overrides.yaml").read_text()


def test_a_run_goes_on_with_keys_that_would_be_refused_now(
    runs: list[tuple[Config, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hydra.run.dir=here"]) == 0
    stored = Path("here/config.yaml")
    config = yaml.safe_load(stored.read_text())
    config["algorithm"].update(loss="cispo", clip_high=0.4)
    stored.write_text(yaml.safe_dump(config))
    RunDirectory(Path("here")).set_status(Status.failed)
    for more in ([], ["algorithm.clip_high=0.4"]):
        assert main(["plan", "resume=here", *more]) == 0
        assert "algorithm.clip_high=0.4: nothing reads it while algorithm.loss is cispo" in " ".join(
            capsys.readouterr().out.split()
        )
    assert main(["plan", "resume=here", "generator.gpu_memory_utilization=0.123"]) == 2, "what is typed now is refused"
    assert "gpu_memory_utilization=0.123: nothing reads it" in capsys.readouterr().err
    assert main(["resume=here"]) == 0
    assert runs[1][0].algorithm.clip_high == 0.4


def test_a_run_whose_config_cannot_be_planned_any_more(capsys: pytest.CaptureFixture[str], runs: list[Any]) -> None:
    assert main(["hydra.run.dir=here"]) == 0
    stored = Path("here/config.yaml")
    good = yaml.safe_load(stored.read_text())
    RunDirectory(Path("here")).set_status(Status.failed)
    place = f"composer: resume={Path('here').absolute()}: its config no longer fits this version of the product "
    stored.write_text(yaml.safe_dump({**good, "parallel": {**good["parallel"], "expert_parallel": 3}}))
    for more in ([], ["tracking.timeout_s=3"]):
        assert main(["resume=here", *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"{place}(parallel.expert_parallel=3: must divide")
        assert error.endswith("; resume it with the version that started it\n")
    stored.write_text(yaml.safe_dump({**good, "tracking": {**good["tracking"], "uri": "http://a:b@c"}}))
    assert main(["plan", "resume=here"]) == 2
    assert "; give another `tracking.uri`, or resume it with the version" in capsys.readouterr().err
    assert main(["plan", "resume=here", "tracking.uri=null"]) == 0
    stored.write_text(yaml.safe_dump(good))
    capsys.readouterr()
    assert main(["plan", "resume=here", "tracking.uri=http://a:b@c"]) == 2
    assert capsys.readouterr().err.startswith("composer: tracking.uri=")
    assert len(runs) == 1


def test_a_plan_of_a_resumed_run_starts_nothing(runs: list[Any]) -> None:
    assert main(["hydra.run.dir=here"]) == 0
    RunDirectory(Path("here")).set_status(Status.failed)
    assert main(["plan", "resume=here"]) == 0
    with RunDirectory(Path("here")).lock():  # alive
        assert main(["plan", "resume=here"]) == 0
        assert main(["resume=here"]) == 2
    assert len(runs) == 1


def test_a_plan_says_what_to_type_for_it(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "my_conf" / "mix").mkdir(parents=True)
    (own_folder / "my_conf" / "mix" / "ours.yaml").write_text("defaults: [quickstart]\nname: ours\n")
    monkeypatch.setattr("composer.shell.shutil.which", lambda name: f"/usr/bin/{name}")
    words = ["mix=ours", "mix.phases.sft.warmup_steps=3", "experiment=quickstart"]
    assert main(["plan", "-cd", "my_conf", *words]) == 0
    assert f"  composer --config-dir {own_folder}/my_conf {' '.join(words)}\n" in capsys.readouterr().out
    assert main(["plan", "-m", "mix.phases.sft.warmup_steps=3,4"]) == 0
    assert "job 1: mix.phases.sft.warmup_steps=4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "composer"], "composer: is one word too many: leave it out"),
        (["plan", "plan"], "one word too many"),
        (["doctor", "-m"], "leave out -m"),
        (["audit", "-m"], "`composer audit` looks at one config at a time: leave out -m"),
        (["tasks"], "composer: tasks='': write `composer tasks check [overrides]`"),
        (["tasks", "chekc"], "composer: tasks='chekc': write `composer tasks check"),
    ],
)
def test_words_that_do_not_go_together(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", "''", "' '"])
def test_an_empty_resume_starts_no_new_run(value: str, runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`composer resume=$RUN` with a variable that is not set."""
    assert main([f"resume={value}"]) == 2
    assert "names no directory: give that of a run" in capsys.readouterr().err
    assert not runs


@pytest.mark.parametrize("value", ["3", "a,b", "[a]", "a b", "it's"])
def test_a_directory_of_whatever_name_is_resumed(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"resume={value}"]) == 2
    assert capsys.readouterr().err.startswith(f"composer: resume={Path.cwd() / value}: no such directory")


def test_a_config_file_cannot_ask_for_a_resume(
    own_folder: Path, runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "experiment").mkdir()
    (own_folder / "experiment" / "my.yaml").write_text("# @package _global_\nresume: /old\n")
    assert main(["--config-dir", ".", "+experiment=my"]) == 2
    assert "command line only: `composer resume=/old` (in experiment/my.yaml, line 2)" in capsys.readouterr().err
    assert not runs


@pytest.mark.parametrize("taken", ["/", ".", "~", "/tmp", "/etc/hostname/x", "", "' '", "'${nope}'", "${nope}"])
@pytest.mark.parametrize("command", [["plan"], []])
@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_directory_that_no_run_can_have(
    key: str,
    command: list[str],
    taken: str,
    own_folder: Path,
    runs: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(own_folder))
    (own_folder / "thesis.tex").touch()
    assert main([*command, *(["-m"] if "sweep" in key else []), f"{key}={taken}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"composer: {key}=") and error.count("\n") == 1
    assert not runs and len(list(own_folder.iterdir())) == 1


@pytest.mark.parametrize("command", [["plan"], [], ["-m"]])
def test_a_run_root_that_is_a_file(
    command: list[str], own_folder: Path, runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "file").touch()
    assert main([*command, "run_root=file"]) == 2
    assert "file is a file: choose a folder" in capsys.readouterr().err
    assert not runs


def with_codebase(folder: Path) -> list[str]:
    return ["mix.codebase.kind=files", f"mix.codebase.path={folder}", "mix.codebase_share=0.9"]


def test_files_that_are_no_text_are_in_the_record(
    own_folder: Path, runs: list[tuple[Config, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "held_out").mkdir()
    for i in range(8):
        (own_folder / "held_out" / f"{i}.py").write_text("pass\n")
    (own_folder / "held_out" / "a.so").write_bytes(b"\x7fELF\0")
    assert main(with_codebase(own_folder / "held_out")) == 0
    words = "1 of 9 files are binary or not in UTF-8 and are left out, such as a.so"
    assert f"note: mix.codebase.pattern='**/*': {words}" in capsys.readouterr().out
    [(_, run_dir)] = runs
    assert any(words in warning for warning in yaml.safe_load((run_dir / "plan.yaml").read_text())["warnings"])


@pytest.mark.parametrize(("content", "words"), [(None, "is not there"), (b"\x7fELF\0", "all 1 files are binary")])
def test_a_corpus_without_text_starts_nothing(
    content: bytes | None, words: str, own_folder: Path, runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (own_folder / "held_out").mkdir()
        (own_folder / "held_out" / "a.so").write_bytes(content)
    assert main(with_codebase(own_folder / "held_out")) == 3
    error = capsys.readouterr().err
    assert error.startswith("composer: mix.codebase.path=") and words in error and "Traceback" not in error
    assert not runs and not list(own_folder.glob("runs/*/*"))


@pytest.mark.parametrize("override", ["hydra.output_subdir=${nope}", "hydra.job_logging.version=3"])
def test_what_is_wrong_in_hydras_own_keys(
    override: str, runs: list[Any], capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    assert main([override]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"composer: hydra='{override}': ") and "Traceback" not in error
    assert not runs and not list(own_folder.glob("runs/*/*"))


def sweep(*argv: str) -> int:
    """A sweep without MLflow, which has tests of its own."""
    return main(["-m", "~hydra.callbacks.sweep", *argv])


def test_a_sweep_runs_a_job_for_each_value(runs: list[tuple[Config, Path]]) -> None:
    assert sweep("algorithm.learning_rate=1e-4,3e-4", "seed=1,2", "hydra.sweep.dir=all") == 0
    assert [(c.algorithm.learning_rate, c.seed) for c, _ in runs] == [(1e-4, 1), (1e-4, 2), (3e-4, 1), (3e-4, 2)]
    assert [d.relative_to(Path.cwd()) for _, d in runs] == [Path(f"all/{i}") for i in range(4)]
    assert all((d / "plan.yaml").is_file() and RunDirectory(d).status is Status.finished for _, d in runs)


def test_every_job_is_checked_before_the_first_starts(runs: list[Any], own_folder: Path) -> None:
    assert sweep("algorithm.group_size=8,4,0") == 2
    assert sweep("parallel.expert_parallel=1,3") == 2
    assert not runs
    assert not list(own_folder.iterdir())


def test_a_failed_job_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def run(config: Config, plan: Any, run_dir: Path) -> int:
        seeds.append(config.seed)
        if config.seed == 1:
            (run_dir / "logs").mkdir()
            raise TrainingError("the loss is not finite")
        return 0

    stand_in(monkeypatch, run)
    assert sweep("seed=0,1,2", "hydra.sweep.dir=all") == 1
    assert seeds == [0, 1, 2]
    assert [RunDirectory(Path("all") / str(i)).status for i in range(3)] == [
        Status.finished,
        Status.failed,
        Status.finished,
    ]
    assert "\ncomposer: the loss is not finite\n" in capsys.readouterr().err


def test_a_job_that_is_refused_or_interrupted_before_it_began_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        if config.seed == 0:
            raise MachineError("this machine has no disk")
        if config.seed == 1:
            (run_dir / "logs").mkdir()
            raise TrainingError("the loss is not finite")
        raise KeyboardInterrupt

    stand_in(monkeypatch, run)
    assert sweep("seed=0,1,2,3", "hydra.sweep.dir=all") == 130
    assert [p.name for p in Path("all").iterdir() if p.is_dir()] == ["1"]
    assert f"interrupted before anything was begun; {Path('all/2').absolute()} is removed" in capsys.readouterr().err


def test_an_interrupted_job_stops_the_sweep_which_names_the_jobs_it_did_not_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def run(config: Config, plan: Any, run_dir: Path) -> int:
        seeds.append(config.seed)
        return 130

    stand_in(monkeypatch, run)
    assert sweep("seed=0,1,2") == 130
    assert seeds == [0]
    said = "composer: of the 3 jobs of this sweep these were not begun: job 1 (seed=1), job 2 (seed=2)\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("subdir", ["same", "./same/", "${now:%Y}", "${hydra.sweep.dir}", "."])
@pytest.mark.parametrize("command", [[], ["plan"]])
def test_jobs_cannot_share_a_directory(
    subdir: str, command: list[str], runs: list[Any], own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*command, "seed=0,1", f"hydra.sweep.subdir={subdir}", "hydra.sweep.dir=all") == 2
    error = capsys.readouterr().err
    assert error.startswith("composer: hydra.sweep.subdir=") and error.count("\n") == 1
    assert ("the sweep and job 0" if subdir == "." else "job 0 and job 1") in error and "${hydra.job.num}" in error
    assert not runs and not list(own_folder.iterdir())


@pytest.mark.parametrize("second", ["1e-4", "0.0001"])
@pytest.mark.parametrize("command", [[], ["plan"]])
def test_a_value_that_is_listed_twice_starts_no_job(
    second: str, command: list[str], runs: list[Any], own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*command, f"algorithm.learning_rate=1e-3,1e-4,{second}") == 2
    error = capsys.readouterr().err
    assert error.startswith("composer: -m='algorithm.learning_rate=0.0001': job 2 would be job 1 again (algorithm.")
    assert error.count("\n") == 1 and "sweep over `seed`" in error
    assert not runs and not list(own_folder.iterdir())


def test_hydra_expressions_in_the_sweep_directory(runs: list[tuple[Config, Path]]) -> None:
    assert sweep("seed=0,1", "hydra.sweep.dir=${run_root}/x", "hydra.sweep.subdir=${hydra:job.num}-${seed}") == 0
    assert [d.name for _, d in runs] == ["0-0", "1-1"]


def test_a_config_that_says_multirun_is_a_sweep(own_folder: Path, runs: list[tuple[Config, Path]]) -> None:
    assert main(["~hydra.callbacks.sweep", "hydra.mode=MULTIRUN", "seed=1,2"]) == 0
    (own_folder / "experiment").mkdir()
    (own_folder / "experiment" / "my.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    assert main(["~hydra.callbacks.sweep", "--config-dir", ".", "experiment=my", "seed=3,4"]) == 0
    assert [c.seed for c, _ in runs] == [1, 2, 3, 4]
    assert [d.name for _, d in runs] == ["0", "1"] * 2


def test_values_without_a_sweep_are_answered(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ([], ["hydra.mode=RUN"], ["hydra.verbose=true"]):
        assert main([*mode, "seed=1,2"]) == 2
        assert "add `-m`" in capsys.readouterr().err
    assert not runs


def test_experiments_can_be_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "+experiment=composer1,composer2"]) == 0
    out = capsys.readouterr().out
    assert "qwen3_30b_a3b-micro-composer2" in out and "kimi_k2_5-composer2-micro" in out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--help"], "composer doctor"),
        (["plan", "--help"], "algorithm: composer2, quickstart"),
        (["--hydra-help"], "hydra/launcher"),
        (["--cfg", "job"], "group_size: 8"),
        (["plan", "seed=17", "--cfg", "job"], "seed: 17"),
        (["--cfg", "job", "plan", "--package", "algorithm"], "# @package algorithm"),
        (["-c", "all", "--resolve", "seed=17"], "seed: 17"),
        (["--info"], "Config search path"),
        (["--info", "plan"], "Config search path"),
        (["--info", "defaults-tree", "+experiment=composer2"], "experiment: composer2"),
        (["--version"], "composer 0."),
    ],
)
def test_hydras_habits(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str], own_folder: Path) -> None:
    assert exit_code(argv) == 0
    assert expected in capsys.readouterr().out
    assert not list(own_folder.iterdir())


def test_help_fits_a_screen_and_begins_with_what_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 48 and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    places = [text.index(words) for words in ("composer plan [overrides]", "--multirun", "mix: composer2", "Examples:")]
    assert places == sorted(places)
    assert "hidden_size" not in text, "the config has `--cfg job`"


def exit_code(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as exit:
        return int(exit.code or 0)


def test_a_wrong_config_is_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "+typo=1"]) == 2
    shown = capsys.readouterr()
    assert "typo: 1" in shown.out
    assert "typo=1: no such key" in shown.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("composer pl", "plan"),
        ("composer doc", "doctor"),
        ("composer algorithm.gr", "algorithm.group_size="),
        ("composer plan algorithm.gr", "algorithm.group_size="),
        ("composer plan model=", "model=kimi_k2_5"),
        ("composer +experiment=composer", "+experiment=composer2"),
        ("composer plan ", "seed="),
    ],
)
def test_tab_completion(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert exit_code(["-sc", "query=bash"]) == 0
    assert expected in capsys.readouterr().out.split()


def test_tab_completion_is_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["composer"])
    assert exit_code(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion composer")


def main_on_a_full_disk(argv: list[str]) -> int:
    """The command with its standard output on a disk that is full."""
    # Not in a fixture: pytest sets its own stream again between set-up and test.
    with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream):  # noqa: PTH123
        return main(argv)  # closing the stream raises, if what it did not take is still in it


@pytest.mark.parametrize("argv", [["plan"], ["doctor"], ["plan", "-m", "seed=1,2"], ["--version"], ["--cfg", "job"]])
def test_an_answer_that_cannot_be_written(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main_on_a_full_disk(argv) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("composer: standard output cannot be written (No space left on device)")


@pytest.mark.parametrize("argv", [[], ["-m", "~hydra.callbacks.sweep", "seed=1,2"]])
def test_a_full_disk_under_the_output_stops_no_run(argv: list[str], runs: list[Any]) -> None:
    assert main_on_a_full_disk(argv) == 0
    assert runs and all(RunDirectory(d).status is Status.finished for _, d in runs)


def test_a_reader_that_has_gone_stops_no_run(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert sweep("seed=1,2") == 0
    assert [RunDirectory(d).status for _, d in runs] == [Status.finished] * 2


def test_a_closed_output_stops_nothing(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([], ["plan"], ["nope=1"]):
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
        assert main(argv) == (2 if "nope=1" in argv else 0)
        sys.stdout.close()
        sys.stderr.close()


def warn_much(config: Config, plan: Any, run_dir: Path) -> int:
    for i in range(3):
        logging.getLogger("ours").warning("trouble %d", i)
    return 0


@pytest.mark.parametrize("dead", ["full disk", "no reader", "closed", "closed later"])
def test_warnings_that_nobody_can_read_stop_no_run(
    dead: str, monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    def run(config: Config, plan: Any, run_dir: Path) -> int:
        if dead == "closed later":
            sys.stderr.close()
        return warn_much(config, plan, run_dir)

    stand_in(monkeypatch, run)
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") if dead == "full disk" else os.fdopen(write, "w") as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stream)
        if dead == "closed":
            stream.close()
        assert main(["hydra.run.dir=here"]) == 0
    assert RunDirectory(own_folder / "here").status is Status.finished
    assert [f"ours: trouble {i}" in (own_folder / "here" / "composer.log").read_text() for i in range(3)] == [True] * 3


def test_a_log_on_a_full_disk_stops_no_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, warn_much)
    assert main(["hydra.run.dir=here", "hydra.job_logging.handlers.file.filename=/dev/full"]) == 0
    error = capfd.readouterr().err
    assert "ours: trouble 2" in error and "Logging error" not in error and "Traceback" not in error


def test_a_terminal_that_closes_interrupts_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    directories = []

    def run(config: Config, plan: Any, run_dir: Path) -> int:
        directories.append(run_dir)
        (run_dir / "logs").mkdir()
        signal.raise_signal(signal.SIGHUP)
        return 0

    stand_in(monkeypatch, run)
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, code in ((signal.SIG_DFL, 130), (signal.SIG_IGN, 0)):  # ignored: `nohup`
            signal.signal(signal.SIGHUP, handler)
            assert main([]) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [RunDirectory(d).status for d in directories] == [Status.interrupted, Status.finished]


def test_a_working_folder_that_is_gone(own_folder: Path) -> None:
    # In a process of its own: pytest looks at the working folder too.
    code = "import os, sys; from composer.cli import main; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit(main(['plan']))"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == "composer: the working folder does not exist any more: cd into one that does\n"
