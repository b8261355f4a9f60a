"""Keys that nothing reads are refused; that nothing reads them is seen by watching what reads a config."""

import dataclasses
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from composer.binding import leaf_keys
from composer.checks import check
from composer.checks.unread import _TABLE, check_unread
from composer.compose import apply, compose
from composer.errors import ConfigError
from composer.plan import make_plan
from composer.schema import (
    AlgorithmConfig,
    Config,
    Family,
    HoneypotsConfig,
    JudgeConfig,
    LengthPenaltyConfig,
    LossKind,
    ModelConfig,
    Schedule,
    SourceConfig,
    SourceKind,
)

ROOT = Path(__file__).parents[3]
READ_ALIKE = {
    "model.router_score": "each family has one",
    "mix.phases.<name>.kind": "decides what the sources are",
    "env.chat_template": "a text",
    "env.monitor.effect": "what follows from a finding",
    "env.monitor.effects.<name>": "what follows from a finding",
    "env.monitor.judge.effect": "the most that may follow",
    "algorithm.advantage": "a formula of rewards alone",
    "parallel.param_dtype": "a format",
    "generator.dtype": "a format",
    "weight_sync.method": "both publish to a directory",
}
"""Choices under which every key is read."""


class Watched:
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Any) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


def unread(cls: type, key: str, value: object) -> set[str]:
    return {k for rule in _TABLE[cls] if (rule.key, rule.value) == (key, value) for k in rule.keys}


@pytest.mark.parametrize("experiment", sorted(p.stem for p in (ROOT / "conf/experiment").glob("*.yaml")))
def test_what_is_shipped_sets_no_key_that_nothing_reads(experiment: str) -> None:
    assert check_unread(compose([f"+experiment={experiment}"])) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kv_lora_rank=64"],
         "kv_lora_rank=64: nothing reads it while model.family is qwen3_moe (only with deepseek_v3): leave it at 0"),
        (["model.dense_ffn_size=777"], "model.dense_ffn_size=777: nothing reads it while model.family is qwen3_moe"),
        (["model.rope_beta_fast=3"], "model.rope_beta_fast=3.0: nothing reads it while model.family is qwen3_moe"),
        (["+experiment=composer2", "model.rope_factor=1"],
         "model.rope_original_context=8192: nothing reads it while model.rope_factor is 1: leave it at 4096"),
        (["+experiment=composer2", "model.num_dense_layers=0"],
         "model.dense_ffn_size=18432: nothing reads it while model.num_dense_layers is 0: leave it at 0"),
        (["mix.phases.pretrain.sources.code.path=x"],
         "sources.code.kind is stdlib_code (only with files or jsonl): leave it at null"),
        (["mix.codebase.text_field=body"], "mix.codebase.text_field='body': nothing reads it"),
        (["mix.codebase.weight=2"], "mix.codebase.weight=2.0: nothing reads it"),
        (["mix.codebase.kind=jsonl", "mix.codebase.path=x", "mix.codebase.pattern=*.py"], "pattern='*.py': nothing"),
        (["mix.phases.sft.sources.sessions.weight=2"], "sources.sessions.weight=2.0: nothing reads it"),
        (["mix.phases.sft.sources.more={kind: sessions}"], "all sessions are one pool"),
        (["algorithm.importance_cap=3"],
         "importance_cap=3.0: nothing reads it while algorithm.loss is clipped (only with cispo): leave it at 2.0"),
        (["algorithm.loss=cispo", "algorithm.clip_high=0.3"], "algorithm.clip_high=0.3: nothing reads it"),
        (["parallel.gpus_per_node=4"], "parallel.gpus_per_node=4: nothing reads it while parallel.accelerator is cpu"),
        (["generator.gpu_memory_utilization=0.5"], "(only with cuda): leave it at 0.85"),
    ],
)  # fmt: skip
def test_what_nothing_reads_is_refused(overrides: list[str], message: str) -> None:
    groups = [o for o in overrides if o.startswith("+experiment")]
    config = compose(groups)
    if groups:  # whose original context is the default
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, rope_original_context=8192))
    check(config)
    with pytest.raises(ConfigError) as caught:
        check(apply(config, [o for o in overrides if o not in groups]))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("switch", "key"),
    [
        ("algorithm.schedule=constant", "algorithm.min_learning_rate_ratio=0.5"),
        ("mix.phases.sft.schedule=constant", "mix.phases.sft.min_learning_rate_ratio=0.5"),
        ("algorithm.length_penalty.coefficient=0", "algorithm.length_penalty.turns=0.5"),
        ("env.monitor.enabled=False", "env.monitor.penalty=0.25"),
    ],
)
def test_a_switch_may_be_flipped(switch: str, key: str) -> None:
    """By one override, by a sweep over it, and when the run is resumed; a key behind it alone is a mistake."""
    config = apply(compose(), [switch, key])
    for typed in ([], [switch], [switch, key], ["resume=runs/x"]):
        [note] = [w for w in make_plan(config, typed).warnings if key in w]
        assert f"{key}: nothing reads it while {switch.replace('=', ' is ')}" in note
    with pytest.raises(ConfigError, match=f"{key}: nothing reads it"):
        make_plan(config, ["seed=1", key])
    assert not [w for w in check(compose()) if "nothing reads it" in w]


AGENT = "env.agent.command=[mini]"
PLAYED_BY_OTHERS = ["env.tools", "env.system_prompt", "env.max_observation_bytes", "env.invalid_calls_allowed"]


@pytest.mark.parametrize(
    ("stages", "unread_keys"),
    [("[rl]", PLAYED_BY_OTHERS), ("[pretrain,rl]", PLAYED_BY_OTHERS[-1:])],
    ids=["no sessions", "sessions of the expert, who has the env's tools"],
)
def test_what_an_agent_program_does_not_read(stages: str, unread_keys: list[str]) -> None:
    set_ = ["env.max_observation_bytes=99", "env.invalid_calls_allowed=7"]
    config = apply(compose(), [AGENT, f"stages={stages}", *set_])
    notes = [w for w in check_unread(config, [AGENT.partition("=")[0]]) if "while env.agent.command is given" in w]
    assert sorted(w.partition("=")[0] for w in notes) == sorted(unread_keys)
    if "env.tools" in unread_keys:
        [tools] = [w for w in notes if w.startswith("env.tools")]
        assert tools.startswith(f"env.tools={list(compose().env.tools)}: nothing reads it")
    with pytest.raises(ConfigError, match="invalid_calls_allowed=7: nothing reads it while env.agent.command is given"):
        check_unread(config, ["env.invalid_calls_allowed"])
    assert not [w for w in check_unread(apply(compose(), set_)) if "env.agent" in w]


def test_a_tool_that_is_typed_beside_an_agent_program_is_refused() -> None:
    config = apply(compose(), [AGENT, "stages=[rl]"])
    with pytest.raises(ConfigError, match="env.tools="):
        check_unread(config, ["env.tools.more._target_"])


@pytest.mark.parametrize("env", sorted(p.stem for p in (ROOT / "conf/env").glob("*.yaml")))
def test_no_env_that_is_shipped_sets_what_its_player_does_not_read(env: str) -> None:
    assert check_unread(apply(compose([f"env={env}"]), ["stages=[rl]"])) == []


def test_a_monitor_that_is_off_reads_none_of_its_keys() -> None:
    """Each of them is named: by itself, or by the key that it belongs to."""
    monitor = {k.removeprefix("env.monitor.").removesuffix(".<name>") for k in leaf_keys(Config) if "env.monitor." in k}
    behind = {k.removeprefix("env.monitor.") for k in unread(Config, "env.monitor.enabled", False)}
    judged = {f"judge.{key}" for key in unread(JudgeConfig, "url", None)}
    assert behind | judged == monitor - {"enabled"}
    assert unread(HoneypotsConfig, "kinds", []) == {"places", "share"}
    given = ["effects.history=zero", "off=[history]", "network=true", "honeypots.kinds=[answers]", "judge.url=http://a"]
    config = apply(compose(), ["env.monitor.enabled=false", *(f"env.monitor.{override}" for override in given)])
    notes = [w for w in check_unread(config) if "while env.monitor.enabled is False" in w]
    assert sorted(w.partition("=")[0].rpartition(".")[2] for w in notes) == [
        "effects",
        "kinds",
        "network",
        "off",
        "url",
    ]
    assert "env.monitor.effects={'history': 'zero'}: nothing" in " ".join(notes)


def test_baits_without_a_kind_are_read_by_nothing() -> None:
    config = apply(compose(), ["env.monitor.enabled=true", "env.monitor.honeypots.share=0.5"])
    [note] = check_unread(config)
    assert note.startswith(
        "env.monitor.honeypots.share=0.5: nothing reads it while env.monitor.honeypots.kinds is empty"
    )
    assert len(check_unread(apply(config, ["env.monitor.enabled=false"]))) == 1, "and it is named once"


def test_every_choice_was_thought_of() -> None:
    def choices(cls: type, prefix: str = "") -> typing.Iterator[str]:
        for name, hint in typing.get_type_hints(cls).items():
            arguments = typing.get_args(hint)
            if typing.get_origin(hint) is dict:
                hint, name = arguments[1], f"{name}.<name>"
            if dataclasses.is_dataclass(hint):
                yield from choices(typing.cast(type, hint), f"{prefix}{name}.")
            elif isinstance(hint, type) and issubclass(hint, Enum):
                yield f"{prefix}{name}"

    decided = {
        "parallel.accelerator",
        "model.family",
        "mix.phases.<name>.schedule",
        "mix.phases.<name>.sources.<name>.kind",
        "mix.codebase.kind",
        "algorithm.loss",
        "algorithm.schedule",
    }
    assert set(choices(Config)) == decided | set(READ_ALIKE)
    assert {r.key.rpartition(".")[2] for rules in _TABLE.values() for r in rules if isinstance(r.value, Enum)} == {
        key.rpartition(".")[2] for key in decided
    }
    keys = [f".{key}." for key in leaf_keys(Config)]
    assert [
        k for rules in _TABLE.values() for r in rules for k in r.keys if not any(f".{k}." in key for key in keys)
    ] == []


@pytest.mark.parametrize("family", Family)
def test_what_builds_a_model_reads(family: Family) -> None:
    from composer.models import titan
    from composer.models.base import hf_parameter_shapes

    model = compose([f"model={'kimi_k2_5' if family is Family.deepseek_v3 else 'tiny_moe'}"]).model
    watched: Any = Watched(dataclasses.replace(model, router_groups=2 if family is Family.deepseek_v3 else 1))
    titan.build_model_spec(watched)
    hf_parameter_shapes(watched)
    qwen_only = unread(ModelConfig, "family", Family.qwen3_moe)
    assert watched.read & qwen_only == (qwen_only if family is Family.deepseek_v3 else set())


@pytest.mark.parametrize("kind", [k for k in SourceKind if k is not SourceKind.sessions])
def test_what_opens_a_source_reads(kind: SourceKind, tmp_path: Path) -> None:
    from composer.pretrain.sources import open_source

    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "a.jsonl").write_text('{"text": "text"}\n')
    path = {SourceKind.files: tmp_path, SourceKind.jsonl: tmp_path / "a.jsonl"}.get(kind)
    watched: Any = Watched(SourceConfig(kind=kind, path=str(path) if path else None))
    for document in open_source("mix.x", watched, 1024)[:1]:
        document.read(0)
    assert watched.read - {"kind"} == {"path", "pattern", "text_field"} - unread(SourceConfig, "kind", kind)


@pytest.mark.parametrize("kind", LossKind)
def test_what_a_loss_reads(kind: LossKind) -> None:
    import torch

    from composer.rl.loss import policy_loss

    watched: Any = Watched(AlgorithmConfig(name="x", num_steps=1, learning_rate=1.0, loss=kind))
    one = torch.ones(1, 1)
    policy_loss(one, one, one, one, one > 0, 1.0, watched)
    bounds = {"importance_cap", "clip_low", "clip_high"}
    assert watched.read & bounds == bounds - unread(AlgorithmConfig, "loss", kind)


def test_what_a_length_penalty_reads() -> None:
    from composer.rl.advantage import shaped_reward
    from composer.types import Trajectory

    keys = unread(LengthPenaltyConfig, "coefficient", 0.0)
    assert keys == {f.name for f in dataclasses.fields(LengthPenaltyConfig)} - {"coefficient"}
    for coefficient, read in ((0.0, set()), (0.1, keys)):
        watched: Any = Watched(LengthPenaltyConfig(coefficient=coefficient))
        shaped_reward(typing.cast(Trajectory, FINISHED), watched)
        assert watched.read - {"coefficient"} == read


class FINISHED:
    """What a penalty looks at in an episode."""

    reward, turns, parents, num_generated_tokens = 1.0, (), (), 3


@pytest.mark.parametrize(("schedule", "is_read"), [(Schedule.constant, False), (Schedule.cosine, True)])
def test_what_a_schedule_reads(schedule: Schedule, is_read: bool, tmp_path: Path) -> None:
    import torch

    from composer.models.settings import TrainSettings, trainer_config

    def rates(ratio: float) -> list[float]:
        settings = TrainSettings(tmp_path, 5, 1.0, schedule=schedule, min_learning_rate_ratio=ratio)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        config = compose()
        built = trainer_config(config.model, config.parallel, settings).lr_scheduler
        scheduler = built.build(optimizers=[optimizer], training_steps=5)
        found = []
        for _ in range(5):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert (rates(0.1) != rates(0.5)) == is_read
