"""Names inside a sandbox: a responder that gives every name an address of its own making, and asks nobody.

No question leaves the machine, so none can carry anything out. Every name gets an answer, also one that no rule
allows: it is then the proxy that says no, with a plain 403 that cannot be taken for a broken network, and the log shows
the whole URL that was wanted instead of a mere name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import struct
from collections.abc import Callable

_NAME = re.compile(r"([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_NOWHERE = ("arpa", "example", "home", "internal", "invalid", "lan", "local", "localdomain", "localhost", "onion")
"""Top-level names that no server of the internet has an answer for."""
_A, _IN = 1, 1
_NO_ERROR, _FORMAT_ERROR, _NO_SUCH_NAME, _NOT_IMPLEMENTED = 0, 1, 3, 4
_ANSWER, _OPCODE, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x7800, 0x0100, 0x0080
_LIFETIME_S = 300
_FIRST = int(ipaddress.IPv4Address("104.16.0.0"))
"""A large range of the internet; nothing is ever sent there."""


def address_of(name: str) -> str:
    """The address that a name has in sandboxes: always the same one."""
    digest = hashlib.sha256(name.lower().encode()).digest()
    number = int.from_bytes(digest[:4]) % (2**20 - 512)
    return str(ipaddress.IPv4Address(_FIRST + 256 + number))


def is_name(text: str) -> bool:
    """Whether a name could be one of the internet."""
    return len(text) <= 253 and bool(_NAME.fullmatch(text)) and text.rpartition(".")[2] not in _NOWHERE


def answer(query: bytes, knows: Callable[[str], bool] = is_name) -> bytes | None:
    """The response to a DNS query (RFC 1035, section 4); None for what is none.

    Args:
        query: without the length that goes before it over TCP.
        knows: whether a name, in small letters, has an address.
    """
    if len(query) < 12:
        return None
    number, flags, questions, *_ = struct.unpack_from("!6H", query)
    if flags & _ANSWER:
        return None
    kept = _ANSWER | _RECURSION_AVAILABLE | flags & (_OPCODE | _RECURSION_DESIRED)
    if flags & _OPCODE:
        return struct.pack("!6H", number, kept | _NOT_IMPLEMENTED, 0, 0, 0, 0)
    found = _question(query) if questions == 1 else None
    if found is None:
        return struct.pack("!6H", number, kept | _FORMAT_ERROR, 0, 0, 0, 0)
    name, kind, end = found
    question = query[12:end]
    if not knows(name):
        return struct.pack("!6H", number, kept | _NO_SUCH_NAME, 1, 0, 0, 0) + question
    if kind != (_A, _IN):
        return struct.pack("!6H", number, kept | _NO_ERROR, 1, 0, 0, 0) + question
    record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _LIFETIME_S, 4) + ipaddress.IPv4Address(address_of(name)).packed
    return struct.pack("!6H", number, kept | _NO_ERROR, 1, 1, 0, 0) + question + record


def _question(query: bytes) -> tuple[str, tuple[int, int], int] | None:
    """Name, type and class, and where they end."""
    labels, at = [], 12
    while at < len(query) and (length := query[at]):
        if length > 63 or at + 1 + length > len(query):
            return None  # compression has no place in a question
        labels.append(query[at + 1 : at + 1 + length])
        at += 1 + length
    if at + 5 > len(query):
        return None
    name = b".".join(labels).decode("ascii", "replace").lower()
    return name, struct.unpack_from("!HH", query, at + 1), at + 5
