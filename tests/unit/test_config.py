"""Resolved configs as data."""

import dataclasses
import resource
from pathlib import Path

import pytest
import yaml

from composer.compose import apply, compose
from composer.config import CONFIG_FILE, anchored, differences, load, save, to_dict
from composer.errors import ConfigError


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    for overrides in ([], ["+experiment=composer2"], ["tracking.run_name='010'", "algorithm.learning_rate=1e-7"]):
        config = compose(overrides)
        save(config, tmp_path)
        assert load(tmp_path) == config


def test_a_full_disk_leaves_the_config_that_was_there(tmp_path: Path) -> None:
    config = compose()
    save(config, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # stands for the disk: no file takes more
    try:
        with pytest.raises(OSError, match="File too large"):
            save(dataclasses.replace(config, seed=7), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert load(tmp_path) == config
    assert [p.name for p in tmp_path.iterdir()] == [CONFIG_FILE]


def test_a_file_of_another_version(tmp_path: Path) -> None:
    data = to_dict(compose())
    data["algorithm"]["old_knob"] = 1
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=r"algorithm\.old_knob=1: no such key.*config\.yaml"):
        load(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere")


def test_paths_are_anchored(tmp_path: Path) -> None:
    config = anchored(compose(["+experiment=composer2", "weight_sync.directory=/abs"]), tmp_path)
    assert config.run_root == str(tmp_path / "runs")
    assert config.model.checkpoint == str(tmp_path / "models/Kimi-K2.5")
    assert config.mix.phases["bulk_32k"].sources["code"].path == str(tmp_path / "corpora/code")
    assert config.mix.codebase.path == str(tmp_path / "corpora/codebase")
    assert config.weight_sync.directory == "/abs"
    assert anchored(config, Path("/elsewhere")) == config


def test_paths_of_tasksets_and_tools_are_anchored(tmp_path: Path) -> None:
    tools = ["env=coding", "env.taskset.args.path=mine", "+env.tools.semantic_search.args.corpus=docs/x"]
    env = anchored(compose(tools), tmp_path).env
    assert env.taskset.args["path"] == f"{tmp_path}/mine"
    assert env.tools["semantic_search"].args["corpus"] == f"{tmp_path}/docs/x"
    assert anchored(compose(["env=coding"]), tmp_path).env.taskset.args["path"] is None


def test_home_and_databases_are_anchored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = anchored(compose(["run_root='~/runs'", "tracking.uri=sqlite:///a/b.db"]), tmp_path)
    assert (config.run_root, config.tracking.uri) == ("/home/me/runs", f"sqlite:///{tmp_path}/a/b.db")
    for uri in ("sqlite:////a/b.db", "http://host/a", "postgresql://host/a"):
        assert anchored(compose([f"tracking.uri={uri}"]), tmp_path).tracking.uri == uri


def test_differences_and_apply() -> None:
    old = compose()
    new = apply(old, ["algorithm.num_steps=7", "mix.phases.sft.warmup_steps=1", "stages=[pretrain]"])
    assert differences(old, old) == []
    assert {key: value for key, _, value in differences(old, new)} == {
        "algorithm.num_steps": 7,
        "mix.phases.sft.warmup_steps": 1,
        "stages": ["pretrain"],
    }
    assert old.algorithm.num_steps != 7
    with pytest.raises(ConfigError, match=r"did you mean `algorithm\.num_steps`"):
        apply(old, ["algorithm.num_stps=7"])
    with pytest.raises(ConfigError, match="override syntax"):
        apply(old, ["seed={"])


def test_plain_data_only() -> None:
    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(type(k) is str and plain(v) for k, v in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (int, float, bool, str)

    assert plain(to_dict(compose()))
    assert dataclasses.is_dataclass(compose())
