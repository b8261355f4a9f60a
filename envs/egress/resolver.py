"""The event loop of the proxy's process, which is where its names are resolved.

Every connection that mitmproxy opens asks the loop for the address. So an answer of DNS that changes after the rules
have been asked cannot lead to this machine or its network either.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from envs.egress import policy


class AddressError(OSError):
    """A name leads to an address that no rule lets it have."""


class Resolver(asyncio.SelectorEventLoop):
    """Resolves names as the policy says."""

    def __init__(self, rules: policy.Policy) -> None:
        """Of one proxy."""
        super().__init__()
        self._policy = rules
        self._where = {host: policy.split_address(text) for host, text in (rules.addresses or {}).items()}

    async def getaddrinfo(self, host: Any, port: Any, **settings: Any) -> Any:
        """What connections ask.

        Raises:
            AddressError: one of the addresses is not of the open internet, and no rule of this host says `private`.
            OSError: there is none.
        """
        return await self.resolve(host, port, policy.has_rule(self._policy, _text(host), private=True), **settings)

    async def resolve(self, host: Any, port: Any, may_be_private: bool, **settings: Any) -> Any:
        """The same, of a request whose rule is known.

        Raises:
            AddressError, OSError: as of `getaddrinfo`.
        """
        name = _text(host)
        if where := self._where.get(name):
            address, mapped = where
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, mapped or port))]
        found = await super().getaddrinfo(host, port, **settings)
        if not may_be_private and not all(policy.is_public(str(each[4][0])) for each in found):
            raise AddressError(f"{name} leads to an address of this machine's own network")
        return found


def _text(host: Any) -> str:
    return host.decode() if isinstance(host, bytes) else str(host)
