"""What sandboxes may ask of the network: rules, limits and dates, as a user writes them; and what a request gets.

The proxy's process has an environment of its own, so this is the standard library alone (and composer.errors).
"""

from __future__ import annotations

import datetime
import fnmatch
import ipaddress
import re
import types
import typing
import urllib.parse
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from composer.errors import ConfigError

INDEXES = ("", "pypi", "pypi_files", "npm")
_HOST = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?")
_METHOD = re.compile(r"[A-Z]+|\*")
_HEADER = re.compile(r"[A-Za-z0-9-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ODD_PATH = re.compile(r"//|/\.\.?(/|$)|[\\\x00-\x1f\x7f]|%(2e|2f|5c|25)", re.IGNORECASE)
"""In a path that was decoded once: what servers may resolve to another path than the one a rule was held against."""


@dataclass(frozen=True)
class Rule:
    """What happens to some requests. The first rule that fits a request decides."""

    host: str
    """A name; `*.example.com` is every name below example.com, but not it; an IPv4 address only by itself."""
    action: str = "allow"
    """`allow` or `deny`."""
    path: str = "/*"
    """A glob over the decoded path, without the query; `*` stands for slashes too."""
    methods: tuple[str, ...] = ("GET", "HEAD")
    """`*` is every method; a deny rule that names none is for all."""
    private: bool = False
    """Whether the host may be at an address of this machine's own network; loopback and metadata services included."""
    index: str = ""
    """`pypi` (answers of a simple index), `pypi_files` (the files they name) or `npm`: `before` is applied to it."""
    before: str = ""
    """A date: what an index has got since does not exist, nor since a task's own date. Empty: that of the policy."""
    header: str = ""
    """A header that is added to what goes out over HTTPS; its value is in `header_env`."""
    header_env: str = ""
    """Name of the variable with the header's value, which no sandbox sees."""


@dataclass(frozen=True)
class Policy:
    """What a backend's sandboxes may ask of the network. What no rule allows is denied."""

    rules: tuple[Rule, ...]
    before: str = ""
    """The date (UTC) of rules that name none, for tasks without a date of their own (`created_at`)."""
    dropped_headers: tuple[str, ...] = (
        "authorization",
        "proxy-authorization",
        "cookie",
        "x-api-key",
        "api-key",
        "x-auth-token",
        "x-access-token",
        "private-token",
        "x-goog-api-key",
        "x-amz-security-token",
        "x-forwarded-for",
        "forwarded",
    )
    """Never leave, in whatever case they are written."""
    organisation: str = "Northgate Systems Ltd"
    """Whom the sandbox's root certificate names."""
    addresses: dict[str, str] | None = None
    """Host -> `address` or `address:port` where it is reached in place of what DNS says: mirrors."""
    upstream_ca: str = ""
    """A file of further certificates (PEM) by which the proxy trusts the servers it goes to."""
    log: str = ""
    """Folder of the log. Empty: `egress` in the run's folder, or else in the user's state folder."""
    body_bytes: int = 128 * 2**20
    """Of one response; those of indexes are held in memory, the others go on as they come."""
    request_bytes: int = 2**20
    """Of one request's body, whose length has to be told beforehand."""
    requests: int = 2000
    """Of one sandbox."""
    total_bytes: int = 2 * 2**30
    """In and out of one sandbox, bodies alone."""
    connections: int = 16
    """Of one sandbox at a time."""
    timeout_s: float = 60.0
    """Within which a connection has to move a byte."""
    graders: bool = False
    """Whether sandboxes in which no agent works (graders', those of checks before a run) have this network too."""


@dataclass(frozen=True)
class Verdict:
    """What a rule says of a request."""

    is_allowed: bool
    reason: str
    """`allowed`, or why not: `rule`, `default`, `path`, `host`, `index`, `limit`, `address`, `protocol`, `error`."""
    rule: int | None = None
    """Its number, from 0."""


def read_policy(values: Any, key: str = "egress") -> Policy:
    """The policy that a config describes.

    Raises:
        ConfigError: a key is unknown, missing, of another type or out of range.
    """
    values = _mapping(values, key)
    if not isinstance(values.get("rules"), list | tuple) or not values["rules"]:
        raise ConfigError(f"{key}.rules", values.get("rules"), "must list at least one rule, such as {host: pypi.org}")
    rules = tuple(_read_rule(rule, f"{key}.rules[{number}]") for number, rule in enumerate(values["rules"]))
    policy = _build(Policy, {**values, "rules": rules}, key)
    for name in ("body_bytes", "request_bytes", "requests", "total_bytes", "connections", "timeout_s"):
        if not getattr(policy, name) > 0:
            raise ConfigError(f"{key}.{name}", getattr(policy, name), "must be above 0")
    for header in policy.dropped_headers:
        if not _HEADER.fullmatch(header):
            raise ConfigError(f"{key}.dropped_headers", header, "must be names of headers")
    if not policy.organisation.strip() or len(policy.organisation) > 64:
        raise ConfigError(f"{key}.organisation", policy.organisation, "must have 1 to 64 characters")
    for host, where in (policy.addresses or {}).items():
        if split_address(where) is None:
            raise ConfigError(
                f"{key}.addresses.{host}", where, "must be an IPv4 address, or one with a port: 10.0.0.7:443"
            )
    _check_date(policy.before, f"{key}.before")
    for number, rule in enumerate(rules):
        if rule.before and not rule.index:
            raise ConfigError(f"{key}.rules[{number}].before", rule.before, "needs an `index`, whose dates it is about")
        if rule.index and not (rule.before or policy.before):
            raise ConfigError(
                f"{key}.rules[{number}].index", rule.index, f"needs a date: give `before` here or as `{key}.before`"
            )
    return policy


def _read_rule(values: Any, key: str) -> Rule:
    values = _mapping(values, key)
    if values.get("action") == "deny" and "methods" not in values:
        values = {**values, "methods": ("*",)}
    rule = _build(Rule, values, key)
    if not (is_address(rule.host) or _HOST.fullmatch(rule.host)) or len(rule.host) > 253:
        remedy = "must be a name in small letters, *.name, or an IPv4 address; without scheme, port and path"
        raise ConfigError(f"{key}.host", rule.host, remedy)
    if rule.action not in ("allow", "deny"):
        raise ConfigError(f"{key}.action", rule.action, "must be allow or deny")
    if not rule.path.startswith("/"):
        raise ConfigError(f"{key}.path", rule.path, "must begin with /")
    if not rule.methods or not all(_METHOD.fullmatch(method) for method in rule.methods):
        raise ConfigError(f"{key}.methods", list(rule.methods), "must list methods in capitals, such as GET, or *")
    if rule.index not in INDEXES:
        raise ConfigError(f"{key}.index", rule.index, f"must be one of {', '.join(INDEXES[1:])}, or be left out")
    if bool(rule.header) != bool(rule.header_env):
        raise ConfigError(f"{key}.header", rule.header, "goes with `header_env`, the variable that holds its value")
    if rule.header and not (_HEADER.fullmatch(rule.header) and _VARIABLE.fullmatch(rule.header_env)):
        raise ConfigError(f"{key}.header", rule.header, "must be a header's name, and `header_env` a variable's")
    _check_date(rule.before, f"{key}.before")
    return rule


def _mapping(values: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(key, values, "must hold keys and values")
    return values


def _build(cls: type, values: Mapping[str, Any], key: str) -> Any:
    hints = typing.get_type_hints(cls)
    taken = {}
    for name, value in values.items():
        if name not in hints:
            known = ", ".join(f.name for f in fields(cls))
            raise ConfigError(f"{key}.{name}", value, f"is no key here; the keys are {known}")
        taken[name] = _typed(hints[name], value, f"{key}.{name}")
    for field in fields(cls):
        if field.default is MISSING and field.name not in taken:
            raise ConfigError(f"{key}.{field.name}", ..., "is missing: give it")
    return cls(**taken)


def _typed(hint: Any, value: Any, key: str) -> Any:
    if isinstance(value, datetime.date) and hint is str:
        return value.isoformat()
    if hint == tuple[Rule, ...]:
        return value
    if hint == tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(key, value, "must be a list of texts")
        return tuple(value)
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for pair in value.items() for v in pair):
            raise ConfigError(key, value, "must map texts to texts")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kinds = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(key, value, f"must be {kinds[hint]}")
    return value


def _check_date(text: str, key: str) -> None:
    if text:
        try:
            read_date(text)
        except ValueError:
            raise ConfigError(key, text, "must be a date such as 2024-05-01 or 2024-05-01T12:00:00Z") from None


def read_date(text: str) -> datetime.datetime:
    """A date or a moment of ISO 8601; one without a zone is UTC.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


def is_address(host: str) -> bool:
    """Whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def split_address(text: str) -> tuple[str, int | None] | None:
    """`address` or `address:port`; None if it is neither."""
    address, _, port = text.partition(":")
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return None
    if not port:
        return (address, None) if text == address else None
    return (address, int(port)) if port.isdecimal() and 0 < int(port) < 65536 else None


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet: not of this machine, its network, or a metadata service."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        # Addresses that carry an IPv4 one, which a gateway would unpack: 6to4, Teredo, NAT64.
        if found.sixtofour is not None or found.teredo is not None or found in ipaddress.IPv6Network("64:ff9b::/96"):
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved)


def decide(policy: Policy, method: str, host: str, target: str) -> Verdict:
    """What the policy says of a request.

    Args:
        policy: its rules.
        method: in capitals.
        host: a name in small letters without a port, or an IPv4 address.
        target: path and query, as they came.
    """
    path = plain_path(target)
    if path is None:
        return Verdict(False, "path")
    for number, rule in enumerate(policy.rules):
        if _fits_host(rule.host, host) and fnmatch.fnmatchcase(path, rule.path) and _fits_method(rule, method):
            return Verdict(rule.action == "allow", "allowed" if rule.action == "allow" else "rule", number)
    return Verdict(False, "default")


def has_rule(policy: Policy, host: str, *, private: bool = False) -> bool:
    """Whether a rule is about a host; with `private`, one that lets it be at a private address."""
    return any(_fits_host(rule.host, host) and (rule.private or not private) for rule in policy.rules)


def plain_path(target: str) -> str | None:
    """The decoded path of a request target; None for one that servers could take for another."""
    path = target.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):
        return None
    # A scoped package of npm (`/@scope%2fname`) is the one place for an encoded slash.
    if scoped := re.fullmatch(r"/@([a-z0-9._~-]+)%2f([a-z0-9._~-]+)((?:/[^%]*)?)", path, re.IGNORECASE):
        path = f"/@{scoped[1]}/{scoped[2]}{scoped[3]}"
    elif re.search(r"%(2f|5c)", path, re.IGNORECASE):
        return None
    try:
        decoded = urllib.parse.unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None
    return None if _ODD_PATH.search(decoded) else decoded


def _fits_host(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and not is_address(host)
    return host == pattern


def _fits_method(rule: Rule, method: str) -> bool:
    return "*" in rule.methods or method in rule.methods
