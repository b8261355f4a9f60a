"""Addresses of endpoints that are none, or that hold a secret."""

from __future__ import annotations

import pytest

from composer.endpoints import check_endpoint
from composer.errors import ConfigError


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://models.example.com/v1/"])
def test_an_address(url: str) -> None:
    check_endpoint("a.url", url)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "localhost:8000/v1", "ftp://host/v1", "http://", "http:///v1", "http://a b"]
)
def test_what_is_none(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_endpoint("autoinstall.proposer.url", url)
    assert str(error.value) == f"autoinstall.proposer.url={url!r}: is no address: write `http://host:port/v1`"


@pytest.mark.parametrize("url", ["http://me:hunter2@host/v1", "http://host/v1?key=hunter2"])
def test_secrets_are_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"name the variable that holds it in `api_key_env`") as error:
        check_endpoint("autoinstall.proposer.url", url)
    assert "hunter2" not in str(error.value)
