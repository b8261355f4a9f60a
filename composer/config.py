"""A resolved config as plain data: store it in a run directory, read it back, tell two of them apart.

Composing one is `composer.compose`'s part; every process but the driver only reads the stored file, without Hydra.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from composer.binding import bind
from composer.errors import ConfigError
from composer.schema import Config, SourceConfig, Stage, TargetConfig
from composer.tracking.names import anchored_uri

CONFIG_FILE = "config.yaml"
"""The resolved config in a run directory."""
PLAN_FILE = "plan.yaml"
"""The plan in a run directory (`composer.plan`)."""


def to_dict(value: Any) -> Any:
    """Plain nested data (dicts, lists, scalars) of a config or a plan, ready for YAML and JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_dict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(v) for v in value]
    return value.value if isinstance(value, Enum) else value


def save(config: Config, run_dir: Path) -> Path:
    """Write the resolved config into a run directory, for every other process and for resuming.

    Raises:
        OSError: as `save_whole`.
    """
    return save_whole(to_dict(config), run_dir / CONFIG_FILE)


def save_whole(data: Any, path: Path) -> Path:
    """Write plain data as YAML, whole or not at all: without its config, a run cannot be resumed.

    Raises:
        OSError: it could not be written; the file that was there stays.
    """
    half = path.with_name(f"{path.name}.tmp")
    try:
        half.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise


def load(run_dir: Path) -> Config:
    """Read a run directory's config back.

    Raises:
        ConfigError: it is not there, or a newer version of the product no longer reads one of its keys.
    """
    path = Path(run_dir) / CONFIG_FILE
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(str(path), "", f"the run's config cannot be read: {' '.join(str(error).split())}") from None
    return bind(Config, data if data is not None else {}, origin=lambda key: f" (in {path})")


_PATH_ARGUMENTS = ("path", "corpus", "checked")
"""Arguments of tasksets and tools that name a file or a folder."""


def anchored(config: Config, base: Path | None = None) -> Config:
    """`config` with its relative paths made absolute, since other processes and a resumed run start elsewhere.

    Args:
        config: the config.
        base: what the paths are relative to; None: the working directory.
    """
    base = (base or Path.cwd()).absolute()

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(base / Path(path).expanduser())

    def source(s: SourceConfig) -> SourceConfig:
        return replace(s, path=absolute(s.path))

    phases = {
        name: replace(phase, sources={n: source(s) for n, s in phase.sources.items()})
        for name, phase in config.mix.phases.items()
    }

    def target(t: TargetConfig) -> TargetConfig:
        named = {name: absolute(t.args[name]) for name in _PATH_ARGUMENTS if isinstance(t.args.get(name), str)}
        return replace(t, args={**t.args, **named}) if named else t

    model, sync, tracking, env = config.model, config.weight_sync, config.tracking, config.env
    return replace(
        config,
        run_root=str(absolute(config.run_root)),
        model=replace(model, checkpoint=absolute(model.checkpoint), tokenizer=absolute(model.tokenizer)),
        env=replace(env, taskset=target(env.taskset), tools={name: target(t) for name, t in env.tools.items()}),
        mix=replace(config.mix, phases=phases, codebase=source(config.mix.codebase)),
        weight_sync=replace(sync, directory=absolute(sync.directory)),
        tracking=replace(tracking, uri=tracking.uri and anchored_uri(tracking.uri, base)),
    )


def run_name(config: Any) -> str:
    """What runs: the names of the model, of the mix, the env and the algorithm where a stage uses them, each once.

    Args:
        config: a `Config`, or what Hydra composed.
    """
    stages = set(config.stages)
    parts = (
        (config.model, True),
        (config.mix, Stage.pretrain in stages),
        (config.env, stages - {Stage.pretrain}),
        (config.algorithm, Stage.rl in stages),
    )
    return "-".join(dict.fromkeys(part.name for part, is_used in parts if is_used))


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of everything that differs, in the schema's order."""
    return list(_differences(to_dict(old), to_dict(new), ""))


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
