"""Composition through Hydra: what users type wrong, and what the answer is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer.compose import HydraSession, compose, defaults_of_schema, directory, normalise
from composer.config import run_name
from composer.errors import ConfigError
from composer.schema import Stage


@pytest.fixture
def session() -> Iterator[HydraSession]:
    with HydraSession() as session:
        yield session


def error_of(*overrides: str, config_dir: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, str(config_dir) if config_dir else None)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_default_is_the_quickstart() -> None:
    config = compose()
    assert (config.model.name, config.mix.name, config.env.name) == ("tiny_moe", "quickstart", "micro")
    assert config.algorithm.group_size >= 8
    assert config.algorithm.num_steps >= 30
    assert config.evaluation.num_tasks >= 64
    assert config.stages == list(Stage)
    assert compose(["+experiment=quickstart"]) == config


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "tiny_moe-quickstart-micro"),
        (["mix.name=ours"], "tiny_moe-ours-micro-quickstart"),
        (["env.name=ours"], "tiny_moe-quickstart-ours"),
        (["stages=[pretrain]"], "tiny_moe-quickstart"),
        (["stages=[evaluate_after]"], "tiny_moe-micro"),
        (["experiment=composer1"], "qwen3_30b_a3b-micro-composer2"),
    ],
)
def test_a_run_is_called_what_runs(session: HydraSession, overrides: list[str], name: str) -> None:
    composed = session.compose(overrides)
    wanted, chosen_as = directory(composed.hydra, "hydra.run.dir")
    assert run_name(composed.config) == name
    assert wanted.name.endswith(f"-{name}") and wanted.name.count("-") == 3 + name.count("-")
    assert chosen_as is None


@pytest.mark.parametrize(
    ("override", "key", "value", "remedy"),
    [
        ("algorithm.gruop_size=4", "algorithm.gruop_size", "4", "did you mean `algorithm.group_size`?"),
        ("+algorithm.gruop_size=4", "algorithm.gruop_size", 4, "did you mean `algorithm.group_size`?"),
        ("++algorithm.gruop_size=4", "algorithm.gruop_size", 4, "did you mean `algorithm.group_size`?"),
        ("+typo=1", "typo", 1, "no such key"),
        ("group_size=4", "group_size", "4", "did you mean `algorithm.group_size`?"),
        ("algorithm.lr=4", "algorithm.lr", "4", "did you mean `algorithm.learning_rate`?"),
        ("mix.phases.sft.warmup_stps=4", "mix.phases.sft.warmup_stps", "4", "warmup_steps`?"),
        ("mix.phases.stf.tokens=4", "mix.phases.stf.tokens", 4, "did you mean `mix.phases.sft.tokens`?"),
        ("algorithm.group_size.x=4", "algorithm.group_size.x", "4", "no such key"),
        ("algorithm.loss=cliped", "algorithm.loss", "cliped", "did you mean `clipped`?"),
        ("algorithm.advantage=grpoo", "algorithm.advantage", "grpoo", "not one of mean_centered, standardized"),
        ("algorithm.group_size=-3", "algorithm.group_size", -3, "at least 2"),
        ("algorithm.group_size=1000000000000", "algorithm.group_size", 10**12, "at most 1000000"),
        ("generator.max_model_len=1000000000", "generator.max_model_len", 10**9, "at most 100000000"),
        ("mix.phases.sft.tokens=99999999999999999", "mix.phases.sft.tokens", 99999999999999999, "at most"),
        ("seed=99999999999999999999", "seed", 99999999999999999999, "at most 2147483647"),
        ("algorithm.learning_rate=1" + "0" * 400, "algorithm.learning_rate", None, "finite"),
        ("algorithm.temperature=3", "algorithm.temperature", 3, "at most 2"),
        ("run_root=", "run_root", "", "is empty: give a text"),
        ("tracking.experiment=' '", "tracking.experiment", " ", "is empty: give a text"),
        ("plugins=['']", "plugins[0]", "", "is empty: give a text"),
        ("model.name=a/b", "model.name", "a/b", "a name becomes part of paths"),
        ("algorithm.name=../../x", "algorithm.name", "../../x", "a name becomes part of paths"),
        ("algorithm.group_size=abc", "algorithm.group_size", "abc", "a whole number is expected"),
        ("algorithm.group_size=8.0", "algorithm.group_size", 8.0, "write 8"),
        ("algorithm.group_size=true", "algorithm.group_size", True, "write 1"),
        ("algorithm.group_size=010", "algorithm.group_size", "010", "write 10, without leading zeros"),
        ("algorithm.group_size='8'", "algorithm.group_size", "8", "write 8, without quotes"),
        ("algorithm.group_size=null", "algorithm.group_size", None, "null is not allowed"),
        ("algorithm.group_size=???", "algorithm.group_size", "???", ""),
        ("algorithm.learning_rate=nan", "algorithm.learning_rate", None, "finite"),
        ("algorithm.learning_rate=inf", "algorithm.learning_rate", float("inf"), "finite"),
        ("parallel.activation_checkpoint=yes", "parallel.activation_checkpoint", "yes", "write true"),
        ("tracking.run_name=true", "tracking.run_name", True, "quote"),
        ("tracking.run_name=12", "tracking.run_name", 12, "quote it"),
        ("stages=[rl,evalute_after]", "stages[1]", "evalute_after", "did you mean `evaluate_after`?"),
        ("stages=rl", "stages", "rl", "write `stages=[rl]`"),
        ("~algorithm.num_steps", "algorithm.num_steps", "???", "has no value yet"),
        ("model=tiny_mo", "model", "tiny_mo", "did you mean `model=tiny_moe`?"),
        ("+experiment=compser2", "experiment", "compser2", "did you mean `experiment=composer2`?"),
        ("modle=tiny_moe", "modle", "tiny_moe", "did you mean `model"),
        ("hydra/sweeeper=optuna", "hydra/sweeeper", "optuna", "no such config group"),
        ("+model=tiny_moe", "model", "tiny_moe", "without `+`"),
        ("+seed=3", "seed", "3", "write `seed=3` without `+`"),
        ("algorithm.group_size=4,8", "algorithm.group_size", "4,8", "add `-m`"),
        ("algorithm.group_size=range(1,3)", "algorithm.group_size", "range(1,3)", "add `-m`"),
        ("pln", "pln", ..., "did you mean `composer plan`?"),
        ("seed", "seed", ..., "write `seed=<value>`"),
        ("seed={a", "seed", "{a", "override syntax"),
        ("run_root=${nowhere}", "run_root", "${nowhere}", "cannot be resolved"),
        ("run_root=${oc.env:NO_SUCH_VARIABLE_9}", "run_root", "${oc.env:NO_SUCH_VARIABLE_9}", "not found"),
        ("tracking.uri=http://${oc.env:MLFLOW_TOKEN}", "tracking.uri", "http://${oc.env:MLFLOW_TOKEN}", "stored"),
    ],
)
def test_wrong_overrides(override: str, key: str, value: Any, remedy: str) -> None:
    error = error_of(override)
    assert error.key == key
    assert error.value == value or value is None
    assert remedy in str(error)
    assert error.exit_code == 2


@pytest.fixture
def experiments(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("algorithm:\n  length_penalty:\n    coeficient: 1.0", "algorithm.length_penalty.coeficient",
         "did you mean `algorithm.length_penalty.coefficient`? (in "),
        ("mix:\n  phases:\n    sft:\n      sources:\n        sessions:\n          wieght: 1.0",
         "mix.phases.sft.sources.sessions.wieght", "did you mean `mix.phases.sft.sources.sessions.weight`?"),
        ("env:\n  limits:\n    memory_bytes: -1", "env.limits.memory_bytes", "my.yaml, line 4"),
        ("algorithm:\n  loss: cisp", "algorithm.loss", "did you mean `cispo`?"),
        ("tracking:\n  run_name: on", "tracking.run_name", "write true, or 'on'"),
        ("algorithm:\n  num_steps: 010", "algorithm.num_steps", "octal"),
        ("env:\n  episode_timeout_s: 12:30", "env.episode_timeout_s", "base 60"),
        ("seed: 1\nseed: 2", "seed", "stands twice"),
        ("algorithm.num_steps: 3", "algorithm.num_steps", "nest it"),
        ("defaults:\n  - overide /model: tiny_moe", "defaults.overide /model", "did you mean `override`?"),
        ("defaults:\n  - override /model: tiny", "model", "did you mean `model=tiny_moe`?"),
    ],
)  # fmt: skip
def test_wrong_experiment_files(experiments: Path, text: str, key: str, remedy: str) -> None:
    (experiments / "experiment" / "my.yaml").write_text(f"# @package _global_\n{text}\n")
    error = error_of("+experiment=my", config_dir=experiments)
    assert error.key == key
    assert remedy in str(error)


def test_an_experiment_without_its_package_line(experiments: Path) -> None:
    (experiments / "experiment" / "my.yaml").write_text("algorithm:\n  num_steps: 3\n")
    assert "# @package _global_" in str(error_of("+experiment=my", config_dir=experiments))


def test_an_experiment_of_ones_own(experiments: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /parallel: h200_8\nalgorithm:\n  learning_rate: 1e-4\n"
    (experiments / "experiment" / "my.yaml").write_text(text)
    config = compose(["experiment=my"], str(experiments))
    assert config.algorithm.learning_rate == 1e-4
    assert config.parallel.data_parallel_shard == 8


def test_other_packages_bring_config_groups(experiments: Path) -> None:
    (experiments / "algorithm").mkdir()
    (experiments / "algorithm" / "theirs.yaml").write_text("name: theirs\nnum_steps: 7\nlearning_rate: 1e-3\n")
    config = compose([f"hydra.searchpath=[file://{experiments}]", "algorithm=theirs"])
    assert (config.algorithm.name, config.algorithm.num_steps) == ("theirs", 7)


def test_keys_that_no_file_mentions_need_no_plus(session: HydraSession) -> None:
    overrides = normalise(
        ["mix.phases.sft.warmup_steps=3", "env.taskset.args.verbs_per_operator=2", "algorithm.beta1=0.8"]
    )
    config = session.compose(overrides).config
    assert config.mix.phases["sft"].warmup_steps == 3
    assert config.env.taskset.args["verbs_per_operator"] == 2
    assert config.algorithm.beta1 == 0.8


def test_plain_numbers_in_every_notation(session: HydraSession) -> None:
    for text, value in (("1e-4", 1e-4), ("1.0e-4", 1e-4), ("1", 1.0), ("1_000.5", 1000.5)):
        assert session.compose([f"algorithm.learning_rate={text}"]).config.algorithm.learning_rate == value


def test_the_base_has_every_key() -> None:
    base = defaults_of_schema()
    assert base["algorithm"]["group_size"] == 8
    assert base["model"]["hidden_size"] == "???"
    assert base["algorithm"]["loss"] == "clipped"
    assert base["env"]["limits"]["cpu_seconds"] == 60


def test_a_config_dir_that_is_not_there() -> None:
    assert error_of(config_dir=Path("/nowhere")).key == "--config-dir"


@pytest.mark.parametrize("override", ["env.tools={}", "++mix.phases={}"])
def test_an_empty_mapping_is_refused_since_hydra_would_ignore_it(override: str) -> None:
    with pytest.raises(ConfigError, match=r"changes nothing.*remove one with `~"):
        compose([override])
