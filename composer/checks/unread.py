"""Keys that nothing reads, because another key chose something that has no use for them.

Whoever sets such a key believes that it does something: it is refused, unless it has its default. A choice that only
switches something off (a constant schedule, no length penalty) may leave the keys behind it as a group's file says, so
that one override or a sweep can flip it: the plan then notes that they are not read. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from composer.errors import ConfigError
from composer.schema import (
    Accelerator,
    AlgorithmConfig,
    Config,
    Family,
    HoneypotsConfig,
    JudgeConfig,
    LengthPenaltyConfig,
    LossKind,
    ModelConfig,
    PhaseConfig,
    PhaseKind,
    Schedule,
    SourceConfig,
    SourceKind,
    Stage,
)

_GIVEN = object()
"""Any value but the default."""


def _always(node: Any) -> bool:
    return True


@dataclass(frozen=True)
class _Unread:
    """While `key` is `value`, nothing reads `keys`: dotted, below the config class that the table names."""

    key: str
    value: object
    keys: tuple[str, ...]
    is_switch: bool = False
    and_if: Callable[[Any], bool] = _always
    """What else has to hold of the config, which the message does not say."""

    def holds(self, node: Any) -> bool:
        """Whether nothing reads the keys of `node`."""
        value = _value(node, self.key)
        is_so = value != _default(node, self.key) if self.value is _GIVEN else value == self.value
        return is_so and self.and_if(node)


def _makes_no_sessions(config: Config) -> bool:
    """Whether no scripted expert plays, which has the env's tools and prompt whoever plays the episodes."""
    return not (Stage.pretrain in config.stages and any(p.kind is PhaseKind.sft for p in config.mix.phases.values()))


_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_YARN = ("rope_original_context", "rope_beta_fast")
_SOURCE = ("path", "pattern", "text_field")
_PENALTY = ("k", "q", "generated_tokens", "tool_output_tokens", "tool_calls", "turns")
_BAITS = ("places", "share")
_MONITOR = tuple(
    f"env.monitor.{key}"
    for key in (
        *("effect", "effects", "penalty", "off", "network", "judge.url", "honeypots.kinds"),
        *(f"honeypots.{key}" for key in _BAITS),
    )
)
_JUDGE = (
    *("model", "api_key_env", "share", "effect", "min_confidence", "timeout_s", "attempts", "max_input_bytes"),
    *("max_answer_tokens", "flag_unjudged"),
)
_CONSTANT = _Unread("schedule", Schedule.constant, ("min_learning_rate_ratio",), is_switch=True)
_TABLE: dict[type, tuple[_Unread, ...]] = {
    Config: (
        _Unread(
            "parallel.accelerator",
            Accelerator.cpu,
            ("parallel.gpus_per_node", "parallel.gpu_memory_bytes", "generator.gpu_memory_utilization"),
        ),
        _Unread("env.monitor.enabled", False, _MONITOR, is_switch=True),
        # An agent program has prompts, tools and ways of its own.
        _Unread("env.agent.command", _GIVEN, ("env.invalid_calls_allowed",), is_switch=True),
        _Unread(
            "env.agent.command",
            _GIVEN,
            ("env.tools", "env.system_prompt", "env.max_observation_bytes"),
            is_switch=True,
            and_if=_makes_no_sessions,
        ),
    ),
    ModelConfig: (
        _Unread("family", Family.qwen3_moe, (*_MLA, "dense_ffn_size", "router_groups_used", *_YARN)),
        _Unread("num_dense_layers", 0, ("dense_ffn_size",)),
        _Unread("rope_factor", 1.0, _YARN),
    ),
    PhaseConfig: (_CONSTANT,),
    SourceConfig: (
        _Unread("kind", SourceKind.stdlib_code, _SOURCE),
        _Unread("kind", SourceKind.stdlib_prose, _SOURCE),
        _Unread("kind", SourceKind.files, ("text_field",)),
        _Unread("kind", SourceKind.jsonl, ("pattern",)),
        _Unread("kind", SourceKind.sessions, (*_SOURCE, "weight")),
    ),
    AlgorithmConfig: (
        _Unread("loss", LossKind.clipped, ("importance_cap",)),
        _Unread("loss", LossKind.cispo, ("clip_low", "clip_high")),
        _CONSTANT,
    ),
    LengthPenaltyConfig: (_Unread("coefficient", 0.0, _PENALTY, is_switch=True),),
    JudgeConfig: (_Unread("url", None, _JUDGE, is_switch=True),),
    HoneypotsConfig: (_Unread("kinds", [], _BAITS, is_switch=True),),
}


def check_unread(config: Config, typed: Collection[str] = (), *, stored: bool = False) -> list[str]:
    """Look at every choice of a config.

    Args:
        config: the config.
        typed: the dotted keys that were given on the command line. One that is behind a switch was meant to do
            something, unless the switch was given too.
        stored: a run goes on, whose other keys are what they were: only what was typed is refused.

    Returns:
        Warnings: keys behind a switch that is off, and those that a run that goes on has had from its start.

    Raises:
        ConfigError: the first key that nothing reads and that does not have its default.
    """
    warnings: list[str] = []
    named: set[str] = set()
    for prefix, node in _nodes(config, ""):
        for rule in _TABLE.get(type(node), ()):
            if not rule.holds(node):
                continue
            for key in rule.keys:
                value, default, full = _value(node, key), _default(node, key), f"{prefix}{key}"
                if value == default or full in named:
                    continue
                named.add(full)
                remedy = f"nothing reads it {_reason(type(node), prefix, rule, key)}"
                asked = _is_typed(full, typed) and not (rule.is_switch and f"{prefix}{rule.key}" in typed)
                if not asked and (stored or rule.is_switch):
                    warnings.append(f"{full}={_plain(value)}: {remedy}")
                else:
                    raise ConfigError(full, _plain(value), f"{remedy}: leave it at {_plain(default)}")
    return warnings


def _nodes(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted key with a last dot, config) of a config and all inside it."""
    yield prefix, node
    inside = node if isinstance(node, dict) else {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    for name, value in inside.items():
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            yield from _nodes(value, f"{prefix}{name}.")


def _is_typed(key: str, typed: Collection[str]) -> bool:
    """Whether a key, or one below it, was typed."""
    return any(f"{name}.".startswith(f"{key}.") for name in typed)


def _value(node: Any, key: str) -> Any:
    for name in key.split("."):
        node = getattr(node, name)
    return node


def _default(node: Any, key: str) -> Any:
    parent, _, name = key.rpartition(".")
    owner = _value(node, parent) if parent else node
    [field] = [f for f in dataclasses.fields(owner) if f.name == name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _reason(cls: type, prefix: str, rule: _Unread, key: str) -> str:
    """While which key is what; and, of a choice between several, with which the key is read."""
    words = f"while {prefix}{rule.key} is {_shown(rule.value)}"
    if isinstance(rule.value, Enum):
        unread = [r.value for r in _TABLE[cls] if r.key == rule.key and key in r.keys]
        readers = [choice.value for choice in type(rule.value) if choice not in unread]
        words += f" (only with {' or '.join(readers)})" if readers else ""
    return words


def _shown(value: object) -> str:
    """The value of a rule in a sentence."""
    if value is _GIVEN:
        return "given"
    return f"{value:g}" if isinstance(value, float) else "empty" if value == [] else str(value)


def _plain(value: Any) -> Any:
    """A value as it is typed; of a mapping of parts, their names."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
        return list(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return "null" if value is None else value
