"""Addresses of model endpoints, as they stand in config: somebody typed them, and they are stored with the run."""

from __future__ import annotations

from composer.errors import ConfigError
from composer.redaction import hide_address, secret_in_address
from composer.secrecy import secret_error


def check_endpoint(key: str, url: str) -> None:
    """Refuse what cannot be the address of an OpenAI-compatible API, and one with a secret in it.

    Args:
        key: where it stands; `<parent>.url` has `<parent>.api_key_env` beside it.
        url: the address.

    Raises:
        ConfigError: names the key.
    """
    host = url.partition("//")[2].partition("/")[0]
    if why := secret_in_address(url):
        raise secret_error(key, why)
    if not url.startswith(("http://", "https://")) or not host or any(c.isspace() for c in url):
        raise ConfigError(key, url, "is no address: write `http://host:port/v1`")
    if "?" in url:
        remedy = "leave the `?` and what follows out: requests go to paths below the address"
        raise ConfigError(key, hide_address(url), remedy)
