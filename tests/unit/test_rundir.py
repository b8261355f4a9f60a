"""Run directories: claimed once, locked by the living, resumed only when that makes sense."""

import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from composer.compose import compose
from composer.config import CONFIG_FILE, PLAN_FILE, anchored, load, save
from composer.errors import ConfigError, MachineError, ResumeError
from composer.resume import resumed
from composer.rundir import RunDirectory, Status, check_free, claim


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "1"
    path.mkdir(parents=True)
    save(anchored(compose(), tmp_path), path)
    (path / PLAN_FILE).write_text("{}")
    return path


def test_no_directory_is_given_out_twice(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert [claim(wanted, chosen_as=None).name for _ in range(3)] == ["b", "b-2", "b-3"]


def test_a_directory_of_ones_own_choice(tmp_path: Path) -> None:
    wanted, key = tmp_path / "mine", "hydra.run.dir"
    assert claim(wanted, chosen_as=key) == wanted
    assert claim(wanted, chosen_as=key) == wanted  # still empty
    (wanted / "x").touch()
    with pytest.raises(ConfigError, match=r"never overwritten: choose one that does not exist$"):
        claim(wanted, chosen_as=key)
    (wanted / PLAN_FILE).touch()
    with pytest.raises(ConfigError, match=rf"or `.*composer resume={wanted}`"):
        claim(wanted, chosen_as=key)


@pytest.mark.parametrize("taken", ["/", "/tmp", ".", "~", "/etc/hostname", "dangling"])
def test_what_holds_something_becomes_no_run_directory(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for refuse in (check_free, claim):
        with pytest.raises(ConfigError, match=r"^hydra\.sweep\.dir='.*never overwritten"):
            refuse(Path(taken).expanduser(), chosen_as="hydra.sweep.dir")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("key", [None, "hydra.run.dir"])
def test_a_file_in_the_way_is_named(key: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for refuse in (check_free, claim):
        with pytest.raises(ConfigError, match=rf"^{key or 'run_root'}='.*file is a file: choose a folder"):
            refuse(tmp_path / "file" / "2026" / "run", chosen_as=key)


def test_a_folder_that_takes_no_run() -> None:
    """/proc refuses new folders to everybody, root included, as a read-only file system does."""
    with pytest.raises(MachineError, match="set run_root to a folder you may write to"):
        claim(Path("/proc/runs/1"), chosen_as=None)
    with pytest.raises(MachineError, match="free space or change run_root"), RunDirectory(Path("/proc")).lock():
        pass
    check_free(Path("/tmp") / ("x" * 300), chosen_as="hydra.run.dir")  # cannot even be looked at
    with pytest.raises(MachineError, match="cannot be made"):
        claim(Path("/tmp") / ("x" * 300), chosen_as="hydra.run.dir")


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim(tmp_path / "runs" / "12-00-00", chosen_as=None), range(32)))
    assert len(set(claimed)) == 32 and all(p.is_dir() for p in claimed)


def test_the_lock_is_the_drivers(run_dir: Path) -> None:
    directory = RunDirectory(run_dir)
    with directory.lock():
        with pytest.raises(ResumeError, match="still alive"):
            directory.check_resumable()
        with pytest.raises(ResumeError, match="still alive"), directory.lock():
            pass
    directory.check_resumable()


def test_the_lock_ends_with_a_killed_process(run_dir: Path) -> None:
    code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from composer.rundir import RunDirectory
        with RunDirectory(Path({str(run_dir)!r})).lock():
            print("locked", flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with pytest.raises(ResumeError, match=rf"still alive \(process {process.pid} on "):
            RunDirectory(run_dir).check_resumable()
        process.kill()
        process.wait(10)
    RunDirectory(run_dir).check_resumable()


def test_status(run_dir: Path) -> None:
    directory = RunDirectory(run_dir)
    assert directory.status is None
    for status in Status:
        directory.set_status(status)
        assert directory.status is status
    (run_dir / "status.json").write_text("half a fi")
    assert directory.status is None


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda d: (d / PLAN_FILE).unlink(), "not a run directory"),
        (lambda d: (d / CONFIG_FILE).unlink(), "not a run directory"),
        (
            lambda d: (d / CONFIG_FILE).write_text("typo: 1"),
            "no longer fits this version.*with the version that started",
        ),
        (lambda d: (d / CONFIG_FILE).write_text("seed: -1"), "no longer fits this version.*seed=-1"),
        (lambda d: (d / CONFIG_FILE).write_text(""), "no longer fits this version"),
        (lambda d: (d / CONFIG_FILE).write_text("[1]"), "no longer fits this version"),
        (lambda d: (d / CONFIG_FILE).write_bytes(b"\xff\0"), "cannot be read"),
        (lambda d: (d / CONFIG_FILE).write_text("a: [1"), "cannot be read"),
        (lambda d: RunDirectory(d).set_status(Status.finished), "finished"),
        (lambda d: d.rename(d.with_name("2")), "no such directory.*runs/2"),
    ],
)
def test_what_cannot_be_resumed(run_dir: Path, break_it, words: str) -> None:
    break_it(run_dir)
    with pytest.raises(ResumeError, match=words):
        resumed(run_dir, [])


def test_a_sweep_is_not_a_run(run_dir: Path) -> None:
    with pytest.raises(ResumeError, match=r"several runs: give one of them, such as .*runs/1"):
        resumed(run_dir.parent, [])


def test_a_run_is_resumed_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "1"
    run_dir.mkdir(parents=True)
    save(anchored(compose(["model.tokenizer=mine", "stages=[pretrain]"])), run_dir)
    (run_dir / PLAN_FILE).write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config, changes = resumed(run_dir, ["weight_sync.directory=weights"])
    assert (config.model.tokenizer, config.run_root) == (str(tmp_path / "mine"), str(tmp_path / "runs"))
    assert config.weight_sync.directory == str(tmp_path / "elsewhere" / "weights")
    assert [c.partition(":")[0] for c in changes] == ["weight_sync.directory"]


def test_plugins_are_found_where_the_run_was_started(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "hydra.yaml").write_text(f"hydra: {{runtime: {{cwd: {tmp_path}}}}}")
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    save(replace(load(run_dir), plugins=["ours"]), run_dir)
    resumed(run_dir, [])
    assert sys.path == [str(tmp_path), "/elsewhere"]
    (run_dir / ".hydra" / "hydra.yaml").write_text("half a fi")
    resumed(run_dir, [])


def test_how_sandboxes_wait_and_what_episodes_keep_may_change(run_dir: Path) -> None:
    overrides = ["env.pool.warm=0", "env.pool.wait_s=5", "env.checkpoint_turns=3", "env.kept_states=0.5"]
    config, changes = resumed(run_dir, overrides)
    assert (config.env.pool.warm, config.env.checkpoint_turns, config.env.kept_states) == (0, 3, 0.5)
    assert {line.partition(":")[0] for line in changes} == {o.partition("=")[0] for o in overrides}
    for override in ("env.max_turns=3", "env.limits.memory_bytes=67108864", "env.monitor.enabled=false"):
        with pytest.raises(ResumeError, match="cannot become"):
            resumed(run_dir, [override])


def test_safe_overrides_apply_and_others_do_not(run_dir: Path) -> None:
    config, changes = resumed(run_dir, ["tracking.timeout_s=3", "mix.phases.sft.checkpoint_every=7", "seed=0"])
    assert changes == ["mix.phases.sft.checkpoint_every: 100 -> 7", "tracking.timeout_s: 10.0 -> 3.0"]
    assert (config.tracking.timeout_s, config.resume) == (3.0, str(run_dir))
    assert resumed(run_dir, [])[1] == []
    assert load(run_dir).tracking.timeout_s == 10.0
    with pytest.raises(ResumeError, match=r"`algorithm\.learning_rate` was .* cannot become 0.5"):
        resumed(run_dir, ["algorithm.learning_rate=0.5"])
    with pytest.raises(ResumeError, match="changes a whole group"):
        resumed(run_dir, ["tracking=server"])
    for value, words in (
        ("1,2", "several values"),
        ("${oc.env:HOME}", "write the value itself"),
        ("[1", "close brackets"),
    ):
        with pytest.raises(ConfigError, match=rf"^tracking\.timeout_s='{re.escape(value)}': .*{words}"):
            resumed(run_dir, [f"tracking.timeout_s={value}"])
    with pytest.raises(ConfigError, match=r"did you mean `tracking\.timeout_s`"):
        resumed(run_dir, ["tracking.timeout=3"])
