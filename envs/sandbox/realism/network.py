"""Network interfaces as a computer has them, which lead nowhere: a veth pair whose both ends stay in the sandbox.

Called in the supervisor between joining the sandbox's namespaces and giving up its capabilities. Structures are those
of linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/veth.h and linux/route.h.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_NETLINK_ROUTE = 0
_NEWLINK = 16
_REQUEST, _ACKNOWLEDGE, _CREATE, _EXCLUSIVE = 0x1, 0x4, 0x400, 0x200
_ERROR = 2
_IFNAME, _LINKINFO, _INFO_KIND, _INFO_DATA, _VETH_PEER = 3, 18, 1, 2, 1
_SIOCADDRT, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x890B, 0x8914, 0x8916, 0x891C
_UP_AND_RUNNING = 0x41
_ROUTE_UP, _ROUTE_GATEWAY = 0x1, 0x2


@dataclass(frozen=True)
class Network:
    """What there is to see."""

    interface: str = "eth0"
    """Has the address and the route."""
    other: str = "wlan0"
    """Its peer; without an address, like a wireless card that is not connected."""
    address: str = "10.0.2.15/24"
    gateway: str = "10.0.2.2"


def configure(network: Network) -> None:
    """Make the interfaces, in the network namespace of this process.

    Raises:
        OSError: this kernel has no veth, or this process no right to make one.
    """
    _add_pair(network.interface, network.other)
    own = ipaddress.IPv4Interface(network.address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:

        def set_address(request: int, address: ipaddress.IPv4Address) -> None:
            fcntl.ioctl(control, request, _named(network.interface) + _address(address) + bytes(8))

        set_address(_SIOCSIFADDR, own.ip)
        set_address(_SIOCSIFNETMASK, own.netmask)
        for name in (network.other, network.interface):
            fcntl.ioctl(control, _SIOCSIFFLAGS, _named(name) + struct.pack("H22x", _UP_AND_RUNNING))
        # struct rtentry: padding, destination, gateway, mask, flags, and nothing in the rest.
        anywhere = _address(ipaddress.IPv4Address(0))
        route = bytes(8) + anywhere + _address(ipaddress.IPv4Address(network.gateway)) + anywhere
        route += struct.pack("H", _ROUTE_UP | _ROUTE_GATEWAY)
        fcntl.ioctl(control, _SIOCADDRT, route.ljust(120, b"\0"))
    # Nobody is at the gateway. A program that tries is to hear "no route to host" at once and not after three seconds.
    for key, value in (("mcast_solicit", 1), ("ucast_solicit", 0), ("retrans_time_ms", 10)):
        Path(f"/proc/sys/net/ipv4/neigh/{network.interface}/{key}").write_text(str(value))


def _named(interface: str) -> bytes:
    """The first member of struct ifreq."""
    return interface.encode()[:15].ljust(16, b"\0")


def _address(address: ipaddress.IPv4Address) -> bytes:
    """A struct sockaddr_in."""
    return struct.pack("=H2x", socket.AF_INET) + address.packed + bytes(8)


def _attribute(kind: int, payload: bytes) -> bytes:
    padding = bytes(-len(payload) % 4)
    return struct.pack("=HH", len(payload) + 4, kind) + payload + padding


def _add_pair(first: str, second: str) -> None:
    empty = bytes(16)  # struct ifinfomsg
    peer = _attribute(_VETH_PEER, empty + _attribute(_IFNAME, second.encode() + b"\0"))
    info = _attribute(_INFO_KIND, b"veth\0") + _attribute(_INFO_DATA, peer)
    body = empty + _attribute(_IFNAME, first.encode() + b"\0") + _attribute(_LINKINFO, info)
    flags = _REQUEST | _ACKNOWLEDGE | _CREATE | _EXCLUSIVE
    message = struct.pack("=IHHII", 16 + len(body), _NEWLINK, flags, 1, 0) + body
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_ROUTE) as netlink:
        netlink.send(message)
        answer = netlink.recv(4096)
    what, code = struct.unpack_from("=4xH10xi", answer)
    if what != _ERROR or code:
        raise OSError(-code, os.strerror(-code), f"{first}, {second}")
