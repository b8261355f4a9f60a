"""Where names may lead; `localhost` is the one name that leads somewhere on every machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from envs.egress.policy import Policy, Rule
from envs.egress.resolver import AddressError, Resolver


def run(policy: Policy, work: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=lambda: Resolver(policy)) as runner:
        return runner.run(work())


async def connect() -> None:
    await asyncio.open_connection("localhost", 9)


async def addresses() -> set[object]:
    return {entry[4][0] for entry in await asyncio.get_running_loop().getaddrinfo("localhost", 9)}


def test_a_connection_to_this_machine_is_refused_before_it_is_made() -> None:
    with pytest.raises(AddressError, match="localhost leads to an address of this machine's own network"):
        run(Policy((Rule("localhost"),)), connect)


def test_a_rule_may_say_otherwise() -> None:
    assert run(Policy((Rule("localhost", private=True),)), addresses) <= {"127.0.0.1", "::1"}


def test_a_rule_of_another_host_says_nothing() -> None:
    with pytest.raises(AddressError):
        run(Policy((Rule("localhost"), Rule("*.localhost", private=True))), connect)


def test_a_mirror_is_asked_in_place_of_dns() -> None:
    policy = Policy((Rule("pypi.org"),), addresses={"pypi.org": "10.0.0.7:8443", "npm.org": "10.0.0.8"})

    async def look() -> list[Any]:
        loop = asyncio.get_running_loop()
        return [(await loop.getaddrinfo(host, 443))[0][4] for host in ("pypi.org", "npm.org")]

    assert run(policy, look) == [("10.0.0.7", 8443), ("10.0.0.8", 443)]
