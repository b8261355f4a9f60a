"""A sandbox's side: every address leads to two listening sockets and a responder, which somebody outside serves.

Called in the supervisor between joining the sandbox's network and giving up its capabilities. A socket stays in the
network that it was made in, whoever holds it: these go out to the proxy (forward.py), and nothing else of the sandbox's
network leads out of it. "AnyIP", a local route for all of IPv4, makes the kernel take every address for its own, so
what is sent anywhere arrives here; where nobody listens it is refused. IPv6 has no route.

Structures are those of linux/netlink.h, linux/rtnetlink.h and linux/if_addr.h.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct

PORTS = (443, 80)
RESOLVER = "127.0.0.53"
_NAMES = 53
_ADDRESS = "10.0.2.15"
"""Of sandboxes that have no interface but loopback."""
_BACKLOG = 128

_NEWADDR, _NEWROUTE = 20, 24
_REQUEST, _ACKNOWLEDGE, _CREATE, _REPLACE = 0x1, 0x4, 0x400, 0x100
_ERROR = 2
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_OIF, _RTA_PREFSRC = 4, 7
_TABLE_LOCAL, _PROTOCOL_BOOT, _SCOPE_HOST, _TYPE_LOCAL = 255, 3, 254, 2


def open_gate(control: int, sandbox: str, address: str | None) -> None:
    """Make the route and the sockets, and send them out.

    Args:
        control: socket to the proxy (client.py); it is closed.
        sandbox: by which the proxy knows it.
        address: of the sandbox's interface, if it has one.

    Raises:
        OSError: the kernel refuses the route, or the proxy has gone.
    """
    sockets = open_sockets(address)
    with socket.socket(fileno=control) as channel:
        message = json.dumps({"op": "attach", "id": sandbox}).encode()
        socket.send_fds(channel, [message], [each.fileno() for each in sockets])
    # A socket that this process kept would take connections that nobody serves when the proxy has gone.
    for each in sockets:
        each.close()


def open_sockets(address: str | None) -> list[socket.socket]:
    """Make the route and the sockets: two for connections, one for questions, and one for datagrams with questions.

    Args:
        address: of the sandbox's interface, if it has one.

    Raises:
        OSError: the kernel refuses the route, or a port.
    """
    loopback = socket.if_nametoindex("lo")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as netlink:
        if address is None:
            address = _ADDRESS
            own = ipaddress.IPv4Address(address).packed
            body = struct.pack("=BBBBi", socket.AF_INET, 32, 0, 0, loopback)
            _ask(netlink, _NEWADDR, body + _attribute(_IFA_LOCAL, own) + _attribute(_IFA_ADDRESS, own))
        body = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, _TABLE_LOCAL, _PROTOCOL_BOOT, _SCOPE_HOST, _TYPE_LOCAL, 0)
        body += _attribute(_RTA_OIF, struct.pack("=i", loopback))
        _ask(netlink, _NEWROUTE, body + _attribute(_RTA_PREFSRC, ipaddress.IPv4Address(address).packed))
    sockets = [_listen("0.0.0.0", port) for port in PORTS]
    sockets.append(_listen(RESOLVER, _NAMES))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    datagrams.bind((RESOLVER, _NAMES))
    sockets.append(datagrams)
    return sockets


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(_BACKLOG)
    return listener


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", len(payload) + 4, kind) + payload + bytes(-len(payload) % 4)


def _ask(netlink: socket.socket, kind: int, body: bytes) -> None:
    flags = _REQUEST | _ACKNOWLEDGE | _CREATE | _REPLACE
    netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    what, code = struct.unpack_from("=4xH10xi", netlink.recv(4096))
    if what != _ERROR or code:
        raise OSError(-code, f"{os.strerror(-code)} (a local route for every address)")
