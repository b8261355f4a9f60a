"""What is wrong with what was typed: one sentence with key, value and remedy, where Hydra has a page or a riddle.

Overrides are looked at before Hydra sees them, as far as one alone can be judged; what Hydra refuses after that is told
by its message.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from composer.binding import MISSING, accepts, fields_where_lost, leaf_keys, suggest, unknown_key, words_at
from composer.errors import ConfigError
from composer.schema import Config

if TYPE_CHECKING:
    from composer.compose import HydraSession

COMMANDS = ("plan", "doctor", "audit", "tasks", "autoinstall", "behaviour", "look", "run")
"""The words that may stand before overrides."""
_KEY = re.compile(r"[+~]{0,2}[\w-]+([./$][\w-]+)*(@[\w.:-]*)?")
_REQUIRED = frozenset(f.name for f in dataclasses.fields(Config) if f.default == MISSING)
"""Groups without which there is no config."""


def parse(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Overrides as Hydra's grammar reads them.

    Args:
        overrides: what was typed.
        loader: knows the options of groups, among which a `glob(...)` chooses.

    Raises:
        ConfigError: the first that it does not read, or that holds a number too large for it.
    """
    parser, parsed = OverridesParser.create(loader), []
    for typed in overrides:
        try:
            parsed.append(parser.parse_override(typed))
        except (HydraException, ValueError) as error:
            raise _bad_override(typed, one_line(str(error))) from None
        parsed[-1].config_loader = loader
        _check_numbers(typed, parsed[-1])
    return parsed


def _check_numbers(typed: str, override: Override) -> None:
    """A number beyond all floats is read as infinity, and later messages would name that."""
    value = override.value()
    if not _holds_infinity(value.list if isinstance(value, ChoiceSweep) else value):
        return
    text = typed.partition("=")[2]
    too_large = [word for word in re.findall(r"[0-9][0-9_.]*[eE]\+?[0-9]+", text) if math.isinf(float(word))]
    if too_large:
        more = "" if text.lstrip("-") == too_large[0] else f"{too_large[0]} is too large: "
        raise ConfigError(override.key_or_group, text, f"{more}give a finite number")


def _holds_infinity(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_holds_infinity, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isinf(value)


def check_overrides(session: HydraSession, overrides: Sequence[str]) -> None:
    """Refuse what no config could make sense of: no key, no option of a group.

    Raises:
        ConfigError: the first such override.
    """
    added: dict[str, Any] = {}
    for typed, override in zip(overrides, parse(overrides), strict=True):
        key = override.key_or_group
        if not key:
            raise ConfigError("override", typed, "names no key: write `<key>=<value>`")
        is_group = "." not in key and key != "hydra" and session.repository.group_exists(key)
        if override.package is not None and not is_group:
            raise ConfigError(f"{key}@{override.package}", typed, "`@` goes with a config group: leave it out")
        if not is_group or override.is_sweep_override():
            continue
        if override.is_delete():
            if key in _REQUIRED:
                raise ConfigError(key, "~", f"no config is complete without it; {_choose(session, key)}")
            continue
        value = override.value()
        options = value if isinstance(value, list) else [value]
        if not options or not all(isinstance(o, str) and o for o in options):
            raise ConfigError(key, value, f"is no option of the group; {_choose(session, key)}")
        if override.is_add() and key in added and override.package is None:
            remedy = f"the group is chosen already, as {added[key]!r}: give one of the two, or `+{key}=[a,b]` for both"
            raise ConfigError(key, value, remedy)
        added[key] = value


def explain(error: Exception, session: HydraSession, overrides: Sequence[str]) -> ConfigError:
    """The one sentence behind an exception of Hydra's or OmegaConf's."""
    text = one_line(str(error) or str(error.__cause__ or ""))
    if isinstance(error, RecursionError):
        remedy = "its defaults list leads back to itself: take one step of the circle out"
        return ConfigError("config file", f"{session.repository.newest}.yaml", remedy)
    if isinstance(error, MissingConfigException):
        return _no_such_file(error, session, text)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        key = str(error.full_key)
        return ConfigError(key, _value_of(key, overrides), f"cannot be resolved ({text}): mend it")
    reason = one_line(str(error.__cause__)) if error.__cause__ is not None else ""
    for pattern, explanation in _EXPLANATIONS:
        if match := re.search(pattern, text):
            told = explanation(session, overrides, reason, *match.groups())
            asked = re.match(r"In '([^']+)': Could", text)
            where = f" (asked for in {asked[1]}.yaml)" if asked and asked[1] != session.config_name else ""
            return ConfigError(told.key, told.value, told.remedy + where)
    return ConfigError("config", " ".join(overrides), f"cannot be composed: {text or reason}")


def one_line(text: str) -> str:
    """A message without line breaks and without OmegaConf's technical tail."""
    return " ".join(text.partition("full_key:")[0].split())


def _no_such_group(session: HydraSession, overrides: Sequence[str], _: str, group: str) -> ConfigError:
    value = _value_of(group, overrides)
    if group in session.groups():
        return ConfigError(group, value, f"the group is not chosen yet: write `+{group}={value}`")
    if "/" not in group:
        return _no_such_key(session, overrides, _, group.partition("@")[0])
    hint = suggest(group, session.groups())
    meant = f"did you mean `{hint}`?" if hint else f"the groups are {', '.join(session.groups())}"
    return ConfigError(group, value, f"no such config group; {meant}")


def _no_such_key(session: HydraSession, overrides: Sequence[str], _: str, key: str) -> ConfigError:
    parent, _, name = key.rpartition(".")
    value = _value_of(key, overrides)
    if key.startswith("hydra."):
        return ConfigError(key, value, "no such key of Hydra's; `composer --cfg hydra` shows them")
    below = [k.removeprefix(f"{parent}.") for k in leaf_keys(Config) if not parent or k.startswith(f"{parent}.")]
    siblings = list(dict.fromkeys(k.split(".")[0] for k in below))
    if name in siblings and value != "~":  # The schema knows it, but no file mentions it (a free mapping).
        return ConfigError(key, value, f"not in the composed config: write `+{key}={value}` to add it")
    if accepts(Config, key)[0]:
        return ConfigError(key, value, "is not there, so there is nothing to remove: leave it out")
    lost, fields = fields_where_lost(Config, key)
    before, _, wrong = lost.rpartition(".")
    if hint := suggest(wrong, fields):
        meant = ".".join(filter(None, (before, hint))) + key.removeprefix(lost)
        return ConfigError(key, value, f"no such key; did you mean `{meant}`?")
    return unknown_key(key, value, siblings or fields, Config)


def _exists(_: HydraSession, overrides: Sequence[str], __: str, key: str) -> ConfigError:
    value = _value_of(key, overrides)
    return ConfigError(key, value, f"the key exists already: write `{key}={value}` without `+`")


def _chosen_already(_: HydraSession, overrides: Sequence[str], __: str, typed: str) -> ConfigError:
    group, equals, option = typed.partition("=")
    option = option if equals else _value_of(group, overrides)
    if option == "?":
        return ConfigError(
            group,
            "",
            f"an experiment's defaults list chooses the group anew: write `override /{group}: <option>` there",
        )
    return ConfigError(group, option, f"the group is chosen already: write `{group}={option}` without `+`")


def _sweep(_: HydraSession, __: Sequence[str], ___: str, key: str, value: str) -> ConfigError:
    as_list = "" if "(" in value else f"; for a list write `{key}=[{value}]`"
    return ConfigError(key, value, f"to sweep over these values add `-m`{as_list}")


def _not_there(_: HydraSession, __: Sequence[str], ___: str, typed: str) -> ConfigError:
    key, _____, option = typed.partition("=")
    return ConfigError(key, f"~{option}", "is not chosen, so there is nothing to remove: leave it out")


def _another_value(_: HydraSession, __: Sequence[str], ___: str, key: str, value: str, typed: str) -> ConfigError:
    return ConfigError(key, f"~{typed}", f"is {value}: write `~{key}` to remove it whatever it is")


def _not_mergeable(_: HydraSession, __: Sequence[str], reason: str, typed: str) -> ConfigError:
    key, _____, value = typed.partition("=")
    key = key.lstrip("+~")
    if accepts(Config, key)[0]:
        words = words_at(Config, key)
        write = f"{key}=[a,b]" if words == "a list" else f"{key}.<name>=<value>"
        return ConfigError(key, value, f"{words} is expected: write `{write}`")
    return ConfigError(key, value or "~", f"{reason or 'does not fit'}; `composer --cfg hydra` shows what stands there")


def _file_not_mergeable(_: HydraSession, __: Sequence[str], ___: str, name: str, reason: str) -> ConfigError:
    return ConfigError("config file", f"{name}.yaml", f"cannot be merged ({reason}): mend it there")


def _missing_choice(session: HydraSession, _: Sequence[str], __: str, group: str) -> ConfigError:
    return ConfigError(group, MISSING, _choose(session, group))


def _below_null(session: HydraSession, overrides: Sequence[str], _: str) -> ConfigError:
    for typed in overrides:
        key, _, value = typed.lstrip("+~").partition("=")
        parent, _, name = key.rpartition(".")
        if key.startswith("hydra."):
            return ConfigError(key, value, f"`{parent}` is null: write `{parent}={{{name}: {value}}}`")
        if not accepts(Config, key)[0]:
            return _no_such_key(session, overrides, "", key)
    return ConfigError("config", " ".join(overrides), "a key lies below one that is null: give that one whole")


def _search_path(_: HydraSession, overrides: Sequence[str], __: str, what: str) -> ConfigError:
    value = _value_of("hydra.searchpath", overrides)
    return ConfigError("hydra.searchpath", value, f"{what}: give a list such as [file:///folder,pkg://package.conf]")


_Explanation = Callable[..., ConfigError]
_EXPLANATIONS: tuple[tuple[str, _Explanation], ...] = (
    (r"Could not override '([^']+)'\. No match in the defaults list", _no_such_group),
    (r"config group '([^']+)' does not exist", _no_such_group),
    (r"Could not override '([^']+/[^']+)'", _no_such_group),
    (r"Could not override '([^']+)'", _no_such_key),
    (r"An item is already at '([^']+)'", _exists),
    (r"(\S+) appears more than once in the final defaults list", _chosen_already),
    (r"Could not append '([^']+)'", _chosen_already),
    (r"Could not delete '([^']+)'", _not_there),
    (r"Could not delete from config\. '([^']+)' does not exist", _no_such_key),
    (r"Could not delete from config\. The value of '([^']+)' is (.*) and not (.*)\.", _another_value),
    (r"Ambiguous value for argument '([^=]+)=(.*?)'", _sweep),
    (r"Sweep parameters '([^=]+)=(.*)' requires --multirun", _sweep),
    (r"You must specify '([^']+)'", _missing_choice),
    (r"Error merging override (.*)", _not_mergeable),
    (r"In '([^']+)': \w+ raised while composing config: (.*)", _file_not_mergeable),
    (r"Unexpected type for root: NoneType", _below_null),
    (r"(hydra\.searchpath must be .*|No config source registered .*|path=\S+ is not available)", _search_path),
)
"""(a pattern in Hydra's message, what makes a sentence of its groups), the first that matches."""


def _no_such_file(error: MissingConfigException, session: HydraSession, text: str) -> ConfigError:
    missing = error.missing_cfg_file or session.config_name
    group, _, name = missing.rpartition("/")
    options = list(error.options or (session.options(group) if group else []))
    if not group or missing == session.config_name:
        found = ", ".join(o for o in session.options("") if o != "base" and not o.startswith("_")) or "none here"
        remedy = f"no such primary config; there is {found}; give the folder of yours as --config-dir"
        return ConfigError("--config-name", session.config_name, remedy)
    source = re.match(r"In '([^']+)'", text)
    where = f" (asked for in {source[1]})" if source and source[1] != session.config_name else ""
    if not options:
        return ConfigError(group, name, f"no such config group; the groups are {', '.join(session.groups())}{where}")
    hint = suggest(name, options)
    meant = f"; did you mean `{group}={hint}`?" if hint else ""
    if group.startswith("hydra/"):
        meant += "; more come with Hydra's plugins, such as pip install -e '.[optuna]'"
    return ConfigError(group, name, f"no such option; the options are {', '.join(options)}{meant}{where}")


def _bad_override(typed: str, reason: str) -> ConfigError:
    key, equals, value = typed.partition("=")
    if typed in ("composer", *COMMANDS):  # the command word itself is taken out before
        return ConfigError(typed, ..., "is one word too many: leave it out")
    if not typed.strip("+~ "):
        return ConfigError("override", typed, "names no key: write `<key>=<value>`")
    if not equals:
        hint = suggest(typed, COMMANDS)
        meant = f"did you mean `composer {hint}`?" if hint else f"write `{typed}=<value>`"
        return ConfigError(typed, ..., f"is neither a command ({', '.join(COMMANDS)}) nor an override; {meant}")
    if not _KEY.fullmatch(key):
        remedy = "is no key: write names joined by dots, without spaces around, such as `algorithm.group_size=8`"
        return ConfigError(key, value, remedy)
    quoted = value.replace("\\", "\\\\").replace("'", "\\'") if len(value) < 100 else "..."
    quote = f"quote what is no plain word, \"{key}='{quoted}'\""
    if match := re.search(r"while evaluating '.*': (.*)", reason):
        return ConfigError(key, value, f"is not Hydra's override syntax ({match[1]}): mend it, or {quote}")
    return ConfigError(key, value, f"is not Hydra's override syntax: close brackets and quotes, or {quote}")


def _choose(session: HydraSession, group: str) -> str:
    return f"choose one: `{group}=<{', '.join(session.options(group))}>`"


def _value_of(key: str, overrides: Sequence[str]) -> Any:
    for override in reversed(overrides):
        name, equals, value = override.partition("=")
        if name.lstrip("+~").partition("@")[0] == key.partition("@")[0]:
            return value if equals else "~"
    return "?"
