"""Holds a config against the house rule on secrets: they are named in it, and never stored (`composer.redaction`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer.errors import ConfigError
from composer.redaction import HIDDEN, hide_named, named_secret, secret_in, secret_in_words

_VARIABLE = re.compile(
    r"\$\{oc\.env:\s*([A-Za-z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)[A-Za-z0-9_]*)", re.IGNORECASE
)
_NAMES_A_VARIABLE = re.compile(r"(?:key|token|password|secret|header)_env$")
_NAMES_OF_OTHERS = ("env.monitor.effects.", "env.monitor.honeypots.places.")
"""Mappings whose names are kinds of findings and baits."""
_SANDBOX = (
    "what runs in a sandbox is the policy's to read, so no secret of yours belongs there: take it out ({api_key} is "
    "the episode's own key; `header_env` of an egress rule adds one outside of the sandbox)"
)
_REMEDIES = (
    (r"autoinstall\.(proposer|installer)\.", "name the variable that holds it in `api_key_env`"),
    (r"autoinstall\.repositories", "clone it yourself and give the folder, or a *.bundle of it"),
    (r"env\.monitor\.judge\.", "name the variable that holds it in `env.monitor.judge.api_key_env`"),
    (
        r"tracking\.uri",
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment (a "
        "database: what its driver reads, such as PGPASSWORD)",
    ),
    (r"env\.sandbox\.args\.egress", "name the variable that holds it in the rule's `header_env`"),
    (r"env\.(agent|tools)\b", _SANDBOX),
    (r"hydra\.", "export it in the environment from which composer is started"),
)


def refuse_secrets(data: Any, prefix: str = "") -> None:
    """Refuse a config that holds a secret, whatever the key. What it is, is not in the message.

    Args:
        data: plain nested data (dicts, lists, scalars), resolved or not.
        prefix: its own dotted key.

    Raises:
        ConfigError: names the key and the remedy.
    """
    for key, shown, why in _secrets(data, prefix, ""):
        raise secret_error(key, why, shown)


def secret_error(key: str, why: str, shown: str = HIDDEN) -> ConfigError:
    """The error of a key that holds a secret: `why`, in words."""
    name = key.rpartition(".")[2]
    general = f"put it into an environment variable, and give that one's name (`{name}_env`, where there is one)"
    remedy = next((words for pattern, words in _REMEDIES if re.match(pattern, key)), general)
    return ConfigError(key, shown, f"{why}, and secrets are not stored: {remedy}")


def _secrets(value: Any, key: str, name: str) -> Iterator[tuple[str, str, str]]:
    """(dotted key, value as it may be shown, what makes it one) of what is a secret."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _secrets(item, f"{key}.{inner}" if key else str(inner), str(inner))
        return
    if isinstance(value, list | tuple):
        if found := secret_in_words(list(value)):
            yield f"{key}[{found[0]}]", HIDDEN, found[1]
        for number, item in enumerate(value):
            yield from _secrets(item, f"{key}[{number}]", name)
        return
    if isinstance(value, str):
        if variable := _VARIABLE.search(value):
            yield key, hide_named(value), f"would be stored as what the variable {variable[1]} holds"
        elif why := secret_in(value):
            yield key, HIDDEN, why
        elif value and _NAMES_A_VARIABLE.search(name) and not re.fullmatch(r"[A-Za-z_]\w*", value):
            yield key, HIDDEN, "is no name of an environment variable, and maybe what one should hold"
    if not key.startswith(_NAMES_OF_OTHERS) and (why := named_secret(name, value)):
        yield key, HIDDEN, why
