"""Compose a config with Hydra, then bind it strictly to the schema.

Hydra's own exceptions become `ConfigError`s here, so that whatever is wrong, the user reads one sentence: which key,
which value, what to type instead.
"""

from __future__ import annotations

import dataclasses
import re
import typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer.binding import MISSING, accepts, bind
from composer.config import run_name, to_dict
from composer.config_files import CheckedRepository
from composer.errors import ConfigError
from composer.explain import check_overrides, explain, one_line, parse
from composer.schema import Config
from composer.secrecy import refuse_secrets

OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_), replace=True)  # for hydra.run.dir

_HYDRAS = ("job", "launcher", "sweeper", "run", "sweep")
"""Parts of Hydra's own node in which people may write down what its plugins need."""
_REFUSALS = (HydraException, OmegaConfBaseException, ValueError, UserWarning, RecursionError, AssertionError)
"""What Hydra and OmegaConf raise at input that they do not take."""
_INTERPOLATIONS = "write ${<key of the config>}, ${oc.env:VARIABLE,default}, or \\${ for a plain text"


def defaults_of_schema(cls: type = Config) -> dict[str, Any]:
    """Every key with its default, `???` where there is none: `conf/config.yaml` begins with it.

    So a key need not stand in a file to be overridden, shown by `--cfg job` and completed by the shell.
    """
    hints, plain = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        node = hints[field.name]
        if dataclasses.is_dataclass(node) and (default is dataclasses.MISSING or default == MISSING):
            plain[field.name] = defaults_of_schema(typing.cast(type, node))
        else:
            plain[field.name] = MISSING if default is dataclasses.MISSING else to_dict(default)
    return plain


ConfigStore.instance().store(name="base", node=defaults_of_schema(), provider="composer")


@dataclass(frozen=True)
class Composed:
    """What one composition gave."""

    config: Config
    hydra: DictConfig
    """Hydra's own node: output directories, overrides, choices of each group."""


class HydraSession:
    """Hydra on our search path; a context manager, since Hydra keeps one global instance.

    Example:
        >>> with HydraSession() as session:
        ...     session.compose(["algorithm.group_size=4"]).config.algorithm.group_size
        4
    """

    def __init__(
        self, config_dir: str | None = None, config_name: str = "config", config_path: str | None = None
    ) -> None:
        """Prepare a session.

        Args:
            config_dir: a further folder of config groups, looked into first.
            config_name: the primary config.
            config_path: a folder in place of the product's own `conf`.

        Raises:
            ConfigError: a folder is not there.
        """
        for flag, folder in (("--config-dir", config_dir), ("--config-path", config_path)):
            if folder is not None and not (folder and Path(folder).is_dir()):
                raise ConfigError(flag, folder, "no such folder: give one that holds config groups")
        self.config_dir, self.config_name = config_dir, config_name
        self.source = f"file://{Path(config_path).absolute()}" if config_path else "pkg://composer.conf"

    def __enter__(self) -> HydraSession:
        """Make Hydra's global instance ours."""
        GlobalHydra.instance().clear()
        version.setbase("1.3")
        search_path = create_config_search_path(self.source)
        if self.config_dir is not None:
            folder = f"file://{Path(self.config_dir).absolute()}"
            search_path.prepend("command-line", folder, anchor=SearchPathQuery(provider="schema", path=None))
        self.hydra = Hydra.create_main_hydra2("composer", search_path)
        self.repository = CheckedRepository(config_search_path=search_path)
        loader = typing.cast(ConfigLoaderImpl, self.hydra.config_loader)
        loader.repository = self.repository
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give Hydra's global instance back."""
        GlobalHydra.instance().clear()

    def raw(self, overrides: Sequence[str], run_mode: RunMode = RunMode.RUN) -> DictConfig:
        """Compose without binding: Hydra's config, interpolations unresolved, its `hydra` node included.

        Raises:
            ConfigError: Hydra cannot compose this, or it holds a secret.
        """
        overrides = normalise(overrides)
        check_overrides(self, overrides)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="provider=")  # a folder of the search path that is not there
                cfg = self.hydra.compose_config(self.config_name, overrides, run_mode)
            assert cfg.hydra.mode in (None, *RunMode), "resolved here, since Hydra asks for it first"
        except _REFUSALS as error:
            raise explain(error, self, overrides) from None
        # Before anything prints it, or resolves an interpolation and so writes a secret down.
        written: Any = OmegaConf.to_container(cfg, resolve=False)
        hydra = written.pop("hydra")
        refuse_secrets(written)
        refuse_secrets({name: hydra[name] for name in _HYDRAS if name in hydra}, "hydra")
        return cfg

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose and bind.

        Raises:
            ConfigError: Hydra cannot compose this, or the result does not fit the schema.
        """
        cfg = self.raw(overrides)
        return Composed(self.bind(cfg, overrides), cfg.hydra)

    def bind(self, cfg: DictConfig, overrides: Sequence[str]) -> Config:
        """Merge a composed config into the schema a second time, strictly.

        Raises:
            ConfigError: it does not fit.
        """
        HydraConfig.instance().set_config(cfg)
        job = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])
        try:
            data = OmegaConf.to_container(job, resolve=True, throw_on_missing=False)
        except OmegaConfBaseException as error:
            key = str(error.full_key or "config")
            value = OmegaConf.to_container(job, resolve=False)
            for part in re.split(r"[.\[\]]+", key):
                value = value.get(part, "?") if isinstance(value, dict) else value
            raise ConfigError(
                key, value, f"cannot be resolved: {one_line(str(error.msg or error))}; {_INTERPOLATIONS}"
            ) from None
        assert isinstance(data, dict)
        refuse_secrets(data)
        config = bind(Config, data, origin=lambda key: self._origin(key, overrides))
        if config.resume is not None and not any(o.lstrip("+").startswith("resume=") for o in overrides):
            remedy = f"is given on the command line only: `composer resume={config.resume}`"
            raise ConfigError("resume", config.resume, remedy + self._origin("resume", overrides))
        return config

    def _origin(self, key: str, overrides: Sequence[str]) -> str:
        """Where a key was given: on the command line, or in which file and line."""
        plain = re.sub(r"\[\d+\]$", "", key)
        for override in reversed(overrides):
            name = override.partition("=")[0].lstrip("+~")
            if plain == name or name.startswith(f"{plain}.") or plain.startswith(f"{name}."):
                return ""
        try:
            defaults = self.hydra.config_loader.compute_defaults_list(
                config_name=self.config_name, overrides=normalise(overrides), run_mode=RunMode.RUN
            ).defaults
        except HydraException:
            return ""
        for default in reversed(defaults):
            lines = self.repository.lines(default.config_path) if default.config_path else {}
            package = (default.package or "").removeprefix("_global_").lstrip(".")
            for full in (key, plain):
                inside = full.removeprefix(f"{package}.") if package else full
                if (not package or inside != full) and inside in lines:
                    return f" ({lines[inside]})"
        return ""

    def options(self, group: str) -> list[str]:
        """The files of a config group, by name."""
        return list(self.hydra.config_loader.get_group_options(group))

    def groups(self) -> list[str]:
        """The config groups that hold files, Hydra's own left out."""
        return [g for g in self.hydra.list_all_config_groups() if not g.startswith("hydra")]


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> Config:
    """The config that `composer <overrides>` would run.

    Raises:
        ConfigError: key, value and remedy of the first thing that is wrong.
    """
    with HydraSession(config_dir) as session:
        return session.compose(overrides).config


def directory(hydra: Any, key: str) -> tuple[Path, str | None]:
    """The path at a key of Hydra's own node, such as `hydra.run.dir`.

    Returns:
        The path, and `key` if somebody chose that very path: one with the time in it is made anew for every run.

    Raises:
        ConfigError: it is empty or refers to something that does not exist.
    """
    inner = key.removeprefix("hydra.")
    raw: Any = OmegaConf.to_container(hydra, resolve=False)
    for part in inner.split("."):
        raw = raw[part]
    try:
        text = str(OmegaConf.select(hydra, inner))
    except OmegaConfBaseException as error:
        raise ConfigError(key, raw, f"cannot be resolved ({one_line(str(error))}): mend it") from None
    if not text.strip():
        raise ConfigError(key, text, "is empty: name a directory that does not exist yet, or leave the key out")
    return Path(text).expanduser(), None if "${now:" in raw else key


def normalise(overrides: Sequence[str]) -> list[str]:
    """Spare people Hydra's `+` where a key is ours and only not written down yet.

    `experiment=x` can only mean `+experiment=x`, since no experiment is chosen by default; a key inside a mapping with
    free names (`mix.phases.sft.warmup_steps`, `env.taskset.args.seed`) need not stand in the group's file.

    Raises:
        ConfigError: a mapping is set to `{}`, which Hydra merges into what is there and so ignores.
    """
    result = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if value.strip() == "{}":
            key = key.lstrip("+")
            raise ConfigError(key, "{}", f"changes nothing, since entries are merged; remove one with `~{key}.<name>`")
        if equals and key == "experiment":
            result.append(f"+{override}")
        elif equals and key[:1] not in ("+", "~") and accepts(Config, key) == (True, True):
            result.append(f"++{override}")
        else:
            result.append(override)
    return result


def apply(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with single keys changed in the command line's syntax (`a.b=1`), bound again.

    Raises:
        ConfigError: an override does not parse, or its key or value does not fit.
    """
    data = to_dict(config)
    for override in parse(overrides):
        key, typed = override.key_or_group, (override.input_line or "").partition("=")[2]
        if override.is_sweep_override():
            raise ConfigError(key, typed, "several values, where one is expected: give one")
        if "${" in typed:
            raise ConfigError(key, typed, "is not resolved here: write the value itself")
        *path, name = key.split(".")
        node: Any = data
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[name] = override.value()
    return bind(Config, data)
