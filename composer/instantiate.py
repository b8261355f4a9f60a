"""The one choke point through which a `_target_` in a config becomes an object.

`composer` imports neither `envs` nor `launchers`: it names their classes in config, and only here a name is looked up,
only under an allowed prefix, and only with arguments that its constructor knows.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from composer.binding import Origin, check_value, suggest
from composer.errors import ComposerError, ConfigError
from composer.redaction import named_secret
from composer.schema import Config, TargetConfig
from composer.secrecy import secret_error

ALLOWED_PREFIXES = ("envs.", "launchers.")
GIVEN: dict[str, frozenset[str]] = {
    "launcher": frozenset({"run_label", "resources"}),
    "env.sandbox": frozenset({"run_label", "run_dir"}),
    "env.taskset": frozenset({"expert_accuracy", "seed"}),
}
"""Arguments that the framework passes itself, by the target's key: they have another key in the config."""
_PROMISES: dict[str, tuple[str, ...]] = {
    "launcher": ("start", "stop", "check", "sweep"),
    "env.taskset": ("task", "expert"),
    "env.sandbox": ("start", "close", "check", "sweep"),
    "env.tools": ("call",),
    "env.graders": ("grade",),
}
"""What `composer.contract` asks of a class, by the key that names it."""
_KNOB_OF = {"expert_accuracy": "mix.sessions.expert_accuracy", "seed": "seed"}


def instantiate(target: TargetConfig, plugins: Iterable[str] = (), /, *, key: str = "_target_", **given: Any) -> Any:
    """The object that `target` describes.

    Args:
        target: class name and arguments.
        plugins: further allowed package prefixes (`Config.plugins`).
        key: where `target` stands in the config, for messages.
        given: arguments from the caller; those that the constructor does not know are left out.

    Raises:
        ConfigError: as `check_target`, or the constructor refused a value.
    """
    factory = check_target(target, plugins, key=key, given=given)
    known, takes_any = _parameters(factory)
    passed = {n: v for n, v in given.items() if takes_any or n in known}
    try:
        return factory(**{**passed, **target.args})
    except ComposerError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.args", dict(target.args), f"`{target._target_}` refuses this: {error}") from error


def check_target(
    target: TargetConfig,
    plugins: Iterable[str] = (),
    *,
    key: str = "_target_",
    given: Iterable[str] = (),
    origin: Origin = lambda key: "",
) -> Any:
    """Check a target without making it: its name, its arguments' names, and their types as far as annotations tell.

    Args:
        target: class name and arguments.
        plugins: further allowed package prefixes.
        key: where `target` stands in the config, for messages.
        given: names of arguments that the caller will pass.
        origin: where a key was written, for messages.

    Returns:
        The class or function.

    Raises:
        ConfigError: the name is not allowed or leads nowhere, or an argument is unknown, missing or of a wrong type.
    """
    factory = _locate(target._target_, plugins, f"{key}._target_", origin)
    known, takes_any = _parameters(factory)
    given = frozenset(given)
    hints = _hints(factory)
    for name, value in target.args.items():
        full = f"{key}.args.{name}"
        if name in given:
            knob = f"give `{_KNOB_OF[name]}` instead" if name in _KNOB_OF else "the run itself gives it: remove it"
            raise ConfigError(full, value, f"is not set here: {knob}{origin(full)}")
        if name not in known and not takes_any:
            offered = [n for n in known if n not in given]
            hint = suggest(name, offered)
            meant = f"did you mean `{key}.args.{hint}`?" if hint else f"it takes {', '.join(offered) or 'none'}"
            raise ConfigError(full, value, f"`{target._target_}` has no such argument; {meant}{origin(full)}")
        if why := named_secret(name, value):
            raise secret_error(full, why)
        if name in hints and _is_plain(hints[name]):
            check_value(hints[name], value, full, origin)
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in target.args and name not in given:
            raise ConfigError(f"{key}.args.{name}", "???", f"`{target._target_}` needs this argument: give it")
    return factory


def accepts(target: TargetConfig, argument: str, plugins: Iterable[str] = (), /, *, key: str = "_target_") -> bool:
    """Whether the constructor that `target` names takes this argument.

    Raises:
        ConfigError: the name is not allowed or leads nowhere.
    """
    known, takes_any = _parameters(_locate(target._target_, plugins, f"{key}._target_", lambda key: ""))
    return takes_any or argument in known


def targets(config: Config) -> Iterator[tuple[str, TargetConfig]]:
    """Every target of a config by its dotted key."""
    yield "launcher", config.launcher
    yield "env.taskset", config.env.taskset
    yield "env.sandbox", config.env.sandbox
    for group in ("tools", "graders"):
        for name, target in getattr(config.env, group).items():
            yield f"env.{group}.{name}", target


def check_targets(config: Config) -> dict[str, Any]:
    """Make every target of a config once: constructors start nothing, and refuse what they cannot be.

    Returns:
        The objects by their keys, to ask what they are; they are not those of the run.

    Raises:
        ConfigError: as `instantiate`, or a class does not keep the contract of its key.
    """
    given = {
        "run_label": "check",
        "run_dir": "",
        "resources": {"CPU": 1, "GPU": 0},
        "expert_accuracy": config.mix.sessions.expert_accuracy,
        "seed": config.seed,
    }
    made = {}
    for key, target in targets(config):
        factory = check_target(target, config.plugins, key=key, given=GIVEN.get(key, ()))
        role = next(r for r in _PROMISES if key == r or key.startswith(f"{r}."))
        lacking = [m for m in _PROMISES[role] if isinstance(factory, type) and not hasattr(factory, m)]
        if lacking:
            remedy = f"has no {', '.join(lacking)}, which the contract asks of `{role}`: name a class that keeps it"
            raise ConfigError(f"{key}._target_", target._target_, remedy)
        made[key] = instantiate(target, config.plugins, key=key, **{n: given[n] for n in GIVEN.get(key, ())})
    return made


def _locate(name: str, plugins: Iterable[str], key: str, origin: Origin) -> Any:
    prefixes = (*ALLOWED_PREFIXES, *(f"{p.rstrip('.')}." for p in plugins))
    if not name.startswith(prefixes):
        allowed = ", ".join(prefixes)
        package = name.partition(".")[0]
        remedy = f"must begin with one of {allowed}; to allow a package of yours add `plugins=[{package}]`"
        raise ConfigError(key, name, remedy + origin(key))
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            remedy = f"no module `{missing}`: mend the name, or install the package that has it"
        else:
            remedy = f"its module needs `{missing}`, which is not installed: install it"
        raise ConfigError(key, name, remedy + origin(key)) from None
    except Exception as error:
        raise ConfigError(key, name, f"its module cannot be imported ({error!r}): mend it") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        offered = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module_name]
        hint = suggest(attribute, offered) or (offered[0] if len(offered) == 1 else None)
        meant = f"did you mean `{module_name}.{hint}`?" if hint else f"it has {', '.join(offered) or 'no class'}"
        raise ConfigError(key, name, f"`{module_name}` has no class `{attribute}`; {meant}{origin(key)}")
    return factory


def _parameters(factory: Any) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Named parameters, and whether any other name is taken too."""
    parameters = inspect.signature(factory).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {n: p for n, p in parameters.items() if p.kind not in variadic}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _hints(factory: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(factory.__init__ if isinstance(factory, type) else factory)
    except (NameError, TypeError, AttributeError):  # Annotations that only a type checker can read.
        return {}


def _is_plain(annotation: Any) -> bool:
    """Whether `check_value` can judge values of this annotation."""
    if annotation in (int, float, bool, str, type(None)):
        return True
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, dict):
        return all(_is_plain(a) for a in typing.get_args(annotation))
    return False
