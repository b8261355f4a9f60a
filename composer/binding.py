"""Bind plain data to the frozen dataclasses of `schema/`, strictly, and say what to type instead.

This is the second merge of a composed config. OmegaConf cannot do it: it refuses to merge into nested frozen
dataclasses, turns "8" into 8 and 1.0 into 1 where that is asked for, and knows nothing of ranges. Here a key that
no field reads, a value of another type, an unknown choice or a number out of range is a `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from composer.errors import ConfigError

T = TypeVar("T")
Origin = Callable[[str], str]
"""Dotted key -> where its value was written (" (in conf/x.yaml, line 3)"), or "" if unknown."""

MISSING = "???"
"""OmegaConf's mark of a value that has to be given."""

PLAIN_NAME = re.compile(r"\w[\w .-]{0,99}")
PLAIN_WORDS = "a name becomes part of paths and metrics: use letters, digits, `_`, `-` and `.`, 100 at most"

ALIASES = {
    "lr": "learning_rate",
    "bs": "batch_size",
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
    "dp": "data_parallel_shard",
    "fsdp": "data_parallel_shard",
    "n_gpus": "gpus_per_node",
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "kl_coef": "kl_coefficient",
    "adv_estimator": "advantage",
    "max_seq_len": "max_model_len",
    "steps": "num_steps",
}
"""Names that other frameworks give to a key of ours: difflib would not find them."""


def _nowhere(key: str) -> str:
    return ""


def bind(cls: type[T], data: Mapping[Any, Any], *, prefix: str = "", origin: Origin = _nowhere) -> T:
    """An instance of the frozen dataclass `cls` from nested plain data (dicts, lists, scalars).

    Args:
        cls: a dataclass whose fields are scalars, enums, optional ones of these, lists, dicts or such dataclasses.
        data: what was composed, interpolations already resolved.
        prefix: dotted key of `data` itself, for messages.
        origin: where a key was written, for messages.

    Raises:
        ConfigError: the first key, in the order of `data`, that does not fit.
    """
    return _Binder(cls, prefix, origin).node(cls, data, prefix)


def check_value(annotation: Any, value: Any, key: str, origin: Origin = _nowhere) -> Any:
    """`value` if it fits the annotation (an int becomes a float where a float is expected).

    Raises:
        ConfigError: it does not fit.
    """
    return _Binder(None, "", origin).value(annotation, value, key, {})


def leaf_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key that a config of class `cls` can have; a key of a free dict appears as `<name>`."""
    for field in dataclasses.fields(cls):
        yield from _leaves(_hints(cls)[field.name], f"{prefix}.{field.name}" if prefix else field.name)


def accepts(cls: Any, key: str) -> tuple[bool, bool]:
    """Whether a config of class `cls` can have the dotted key, and whether it lies in a mapping with free names."""
    annotation, in_mapping = _annotation_at(cls, key)
    return annotation is not None, in_mapping


def fields_where_lost(cls: Any, key: str) -> tuple[str, list[str]]:
    """The beginning of a dotted key up to the first name that a config of class `cls` cannot have there, and what can.

    Returns:
        The beginning, and the names in its place; ("", []) if all of the key can be.
    """
    parts = key.split(".")
    for num in range(1, len(parts) + 1):
        if _annotation_at(cls, ".".join(parts[:num]))[0] is None:
            above = _without_none(_annotation_at(cls, ".".join(parts[: num - 1]))[0]) if num > 1 else cls
            names = [f.name for f in dataclasses.fields(above)] if dataclasses.is_dataclass(above) else []
            return ".".join(parts[:num]), names
    return "", []


def words_at(cls: Any, key: str) -> str:
    """What a person should give at a dotted key; "" if a config of class `cls` cannot have it, or anything fits."""
    annotation = _annotation_at(cls, key)[0]
    return "" if annotation in (None, Any) else _words(annotation)


def _annotation_at(cls: Any, key: str) -> tuple[Any, bool]:
    """The annotation at a dotted key (None if there is none), and whether it lies in a mapping with free names."""
    annotation, in_mapping = cls, False
    for part in key.split("."):
        inner = _without_none(annotation)
        origin, args = typing.get_origin(inner), typing.get_args(inner)
        if inner is Any:
            return Any, in_mapping
        if dataclasses.is_dataclass(inner) and part in _hints(typing.cast(type, inner)):
            annotation = _hints(typing.cast(type, inner))[part]
        elif origin is dict:
            annotation, in_mapping = args[1], True
        else:
            return None, in_mapping
    return annotation, in_mapping


def suggest(name: str, candidates: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The candidate that a person who typed `name` most likely meant."""
    alias = ALIASES.get(name.lower())
    if alias in candidates:
        return alias
    if len(name) > 2 and len(begun := [c for c in candidates if c.startswith(name.lower())]) == 1:
        return begun[0]
    close = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=cutoff)
    return close[0] if close else None


def unknown_key(key: str, value: Any, siblings: Sequence[str], root: type | None, where: str = "") -> ConfigError:
    """The error for a key that nothing reads, with the key that was probably meant.

    Args:
        key: the dotted key as written.
        value: its value.
        siblings: keys that exist beside it.
        root: the class of the whole config, searched for keys of that name elsewhere.
        where: " (in <file>, line <n>)" or "".
    """
    parent, _, name = key.rpartition(".")
    elsewhere: dict[str, str] = {}
    for full in leaf_keys(root) if root else ():
        elsewhere.setdefault(full.rpartition(".")[2], full)
    alias = ALIASES.get(name.lower(), name)
    meant = suggest(name, siblings)
    if meant is not None:
        remedy = f"no such key; did you mean `{f'{parent}.{meant}' if parent else meant}`?"
    elif alias in elsewhere or (alias := suggest(name, list(elsewhere), cutoff=0.75) or "") in elsewhere:
        remedy = f"no such key; did you mean `{elsewhere[alias]}`?"
    else:
        listing = ", ".join(siblings) or "none"
        remedy = f"no such key; the keys {'of `' + parent + '`' if parent else 'here'} are {listing}"
    return ConfigError(key, value, remedy + where)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _leaves(annotation: Any, key: str) -> Iterator[str]:
    inner = _without_none(annotation)
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if dataclasses.is_dataclass(inner):
        yield from leaf_keys(typing.cast(type, inner), key)
    elif origin is dict and dataclasses.is_dataclass(args[1]):
        yield from leaf_keys(typing.cast(type, args[1]), f"{key}.<name>")
    else:
        yield key


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


class _Binder:
    """One walk over the data; keeps what every message needs."""

    def __init__(self, root: type | None, prefix: str, origin: Origin) -> None:
        self.root = root if not prefix else None
        self.origin = origin

    def node(self, cls: type[T], data: Any, key: str) -> T:
        kind: Any = cls
        fields = {f.name: f for f in dataclasses.fields(kind)}
        if not isinstance(data, Mapping):
            raise ConfigError(key, data, f"expected a group of keys ({', '.join(fields)})" + self.origin(key))
        values: dict[str, Any] = {}
        for name, raw in data.items():
            full = f"{key}.{name}" if key else str(name)
            if name not in fields:
                raise self.unknown(full, raw, list(fields))
            metadata = fields[name].metadata
            values[name] = self.value(_hints(cls)[name], raw, full, metadata)
        for name, field in fields.items():
            if name not in values and (
                field.default == MISSING
                or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
            ):
                full = f"{key}.{name}" if key else name
                raise ConfigError(full, MISSING, f"has no value yet: give `{full}=<{_words(_hints(cls)[name])}>`")
        return cls(**values)

    def unknown(self, full: str, raw: Any, siblings: list[str]) -> ConfigError:
        where = self.origin(full)
        name = full.rpartition(".")[2]
        if full == "experiment" or full == "default":
            remedy = (
                "no such key; put `# @package _global_` on the first line of the experiment file"
                if full == "experiment"
                else "no such key; did you mean `defaults`?"
            )
            return ConfigError(full, raw, remedy + where)
        if name not in siblings and "." in full and full.startswith(tuple(f"{s}." for s in siblings)):
            nested = full.replace(".", ": ")
            return ConfigError(full, raw, f"a dot inside a YAML key makes another key: nest it, `{nested}`" + where)
        return unknown_key(full, raw, siblings, self.root, where)

    def value(self, annotation: Any, raw: Any, key: str, metadata: Mapping[str, Any]) -> Any:
        if annotation is Any:
            return raw
        inner = _without_none(annotation)
        if raw is None:
            if inner is not annotation or annotation is type(None):
                return None
            raise self.wrong(key, raw, annotation, f"null is not allowed: give {_words(annotation)}")
        if isinstance(raw, str) and raw == MISSING:
            raise self.wrong(key, raw, inner, f"has no value yet: give `{key}=<{_words(inner)}>`")
        origin, args = typing.get_origin(inner), typing.get_args(inner)
        if origin in (typing.Union, types.UnionType):
            return self.first_that_fits(args, raw, key, metadata)
        if dataclasses.is_dataclass(inner):
            return self.node(typing.cast(type, inner), raw, key)
        if origin in (list, tuple, Sequence) or inner in (list, tuple):
            if not isinstance(raw, list | tuple):
                raise self.wrong(key, raw, inner, f"expected a list: write `{key}=[{_plain(raw)}]`")
            item = args[0] if args else Any
            items = [self.value(item, v, f"{key}[{i}]", metadata) for i, v in enumerate(raw)]
            return tuple(items) if tuple in (origin, inner) else items
        if origin in (dict, Mapping) or inner is dict:
            if not isinstance(raw, Mapping):
                raise self.wrong(key, raw, inner, "expected a mapping of names to values")
            for name in raw:
                if not isinstance(name, str):
                    raise self.wrong(f"{key}.{name}", name, str, f"a name is expected: quote it, '{name}'")
                if not PLAIN_NAME.fullmatch(name):
                    raise self.wrong(f"{key}.{name}", name, str, PLAIN_WORDS)
            return {n: self.entry(args[1] if args else Any, n, raw, key, metadata) for n in raw}
        if isinstance(inner, type) and issubclass(inner, Enum):
            return self.choice(inner, raw, key)
        return self.scalar(inner, raw, key, metadata)

    def entry(self, annotation: Any, name: str, raw: Mapping[str, Any], key: str, metadata: Mapping[str, Any]) -> Any:
        """One value of a mapping; an incomplete one whose name looks like another's was meant to be that one."""
        try:
            return self.value(annotation, raw[name], f"{key}.{name}", metadata)
        except ConfigError as error:
            meant = suggest(name, [n for n in raw if n != name])
            if error.value != MISSING or meant is None or not isinstance(raw[name], Mapping):
                raise
            written = next(iter(raw[name]), "")
            remedy = f"nothing of that name is complete; did you mean `{key}.{meant}.{written}`?"
            raise ConfigError(f"{key}.{name}.{written}", raw[name].get(written), remedy + self.origin(key)) from None

    def first_that_fits(self, args: tuple[Any, ...], raw: Any, key: str, metadata: Mapping[str, Any]) -> Any:
        for arg in args:
            try:
                return self.value(arg, raw, key, metadata)
            except ConfigError:
                continue
        raise self.wrong(key, raw, args[0], "expected " + " or ".join(_words(a) for a in args))

    def choice(self, enum: type[Enum], raw: Any, key: str) -> Enum:
        names = [str(m.value) for m in enum]
        if isinstance(raw, enum):
            return raw
        if isinstance(raw, str) and raw in names:
            return enum(raw)
        hint = suggest(raw, names) if isinstance(raw, str) else None
        listing = ", ".join(names)
        meant = f"; did you mean `{hint}`?" if hint else ""
        raise self.wrong(key, raw, enum, f"is not one of {listing}{meant}{_boolean_trap(raw)}")

    def scalar(self, cls: Any, raw: Any, key: str, metadata: Mapping[str, Any]) -> Any:
        given = raw
        if cls is float and isinstance(raw, int) and not isinstance(raw, bool):
            raw = float(raw) if abs(raw) < 2**1023 else math.inf
        if not isinstance(raw, cls) or (isinstance(raw, bool) and cls is not bool):
            raise self.wrong(key, raw, cls, f"{_words(cls)} is expected{_conversion(cls, raw)}")
        if isinstance(raw, float) and not math.isfinite(raw):
            raise self.wrong(key, given, cls, "give a finite number")
        if cls in (int, float):
            self.range(raw, key, metadata)
        if isinstance(raw, str) and not raw.strip() and not metadata.get("may_be_empty"):
            raise self.wrong(key, raw, cls, "is empty: give a text, or leave the key out")
        if isinstance(raw, str) and metadata.get("plain") and not PLAIN_NAME.fullmatch(raw):
            raise self.wrong(key, raw, cls, PLAIN_WORDS)
        return raw

    def range(self, number: float, key: str, metadata: Mapping[str, Any]) -> None:
        low, high, above = (metadata.get(k) for k in ("minimum", "maximum", "above"))
        rules = []
        if low is not None:
            rules.append((number >= low, f"at least {low}"))
        if above is not None:
            rules.append((number > above, f"greater than {above}"))
        if high is not None:
            rules.append((number <= high, f"at most {high}"))
        if not all(ok for ok, _ in rules):
            raise self.wrong(key, number, type(number), "must be " + " and ".join(words for _, words in rules))

    def wrong(self, key: str, raw: Any, cls: Any, remedy: str) -> ConfigError:
        return ConfigError(key, raw, remedy + self.origin(key))


def _words(annotation: Any) -> str:
    """What a person should type for a value of this annotation."""
    inner = _without_none(annotation)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "one of " + ", ".join(str(m.value) for m in inner)
    known = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if inner in known:
        return known[inner]
    if typing.get_origin(inner) is list:
        return "a list"
    return "a group of keys"


def _boolean_trap(raw: Any) -> str:
    return (
        f" (YAML reads on, off, yes and no as {str(raw).lower()}: quote such a word)" if isinstance(raw, bool) else ""
    )


def _conversion(cls: Any, raw: Any) -> str:
    """The exact thing to type, where the intention is plain."""
    if isinstance(raw, bool):
        return {int: f": write {int(raw)}", float: f": write {float(raw)}"}.get(cls, _boolean_trap(raw))
    if cls is str and isinstance(raw, int | float):
        return f": quote it, '{raw}' (on the command line \"'{raw}'\")"
    if cls is int and isinstance(raw, float) and raw.is_integer():
        return f": write {int(raw)}"
    if cls is bool:
        return {"yes": ": write true", "on": ": write true", "no": ": write false", "off": ": write false"}.get(
            str(raw).lower(), ""
        )
    if cls in (int, float) and isinstance(raw, str):
        return _number_in(cls, raw.strip())
    return ""


def _number_in(cls: type, text: str) -> str:
    """What number a text holds, if it holds one in a form that a config value cannot have."""
    if re.fullmatch(r"[+-]?0+[0-9]+", text):
        return f": write {int(text)}, without leading zeros"
    if match := re.fullmatch(r"([0-9.]+) ?([kKmMgG])(i?)[bB]?", text):
        base = 1024 if match[3] else 1000
        return f": write {round(float(match[1]) * base ** ('kmg'.index(match[2].lower()) + 1))}"
    try:
        number = float(text)
    except ValueError:
        return ""
    if not math.isfinite(number) or (cls is int and not number.is_integer()):
        return ""
    return f": write {cls(number)}, without quotes"


def _plain(raw: Any) -> str:
    return str(raw) if isinstance(raw, str | int | float) else "..."
