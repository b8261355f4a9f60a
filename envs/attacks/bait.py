"""Secrets that attacks look for and marks that they leave: on the machine, and in a sandbox beside theirs.

What stands for the machine is planted by `on_host`: files, a process, a server on the loopback address and one on an
abstract socket, all with a secret. The same in a sandbox is planted by `IN_SANDBOX`. An attack knows where to look
(<<bait>>, <<port>>), so nothing but isolation keeps the secret from it. What it would leave on the machine bears its
mark (<<mark>>).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LOOKED_AT = ". tmp var/tmp dev/shm dev/mqueue etc root home home/* run usr/bin usr/local/bin sys/fs/cgroup"
_TEXTS = "/proc/sys/kernel/hostname /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/net/unix /proc/keys"
_SETTINGS = (
    "/proc/sys/kernel/hostname /proc/sys/kernel/core_pattern /proc/sys/kernel/randomize_va_space "
    "/proc/sys/kernel/sysrq /proc/sys/vm/overcommit_memory /proc/sys/vm/drop_caches /proc/sys/net/ipv4/ip_forward"
)
_LEAST_PORT = 20000
_LIFETIME_S = 60


@dataclass
class Bait:
    """The secret of one try, and what came of it."""

    secret: str = field(default_factory=lambda: f"secret-{secrets.token_hex(12)}")
    mark: str = field(default_factory=lambda: f"attack_{secrets.token_hex(6)}")
    port: int = field(default_factory=lambda: _LEAST_PORT + secrets.randbelow(10000))
    num_guests: int = 0
    """Who reached one of the servers on the machine."""

    @property
    def pieces(self) -> Mapping[str, str]:
        """What an attack is told."""
        return {"mark": self.mark, "bait": f"bait_{self.mark}", "port": str(self.port), "key": str(self.key)}

    @property
    def key(self) -> int:
        """Of System V's shared memory."""
        return int(self.mark[-6:], 16) | 1

    def plant(self) -> str:
        """A command line that plants it in a sandbox, and returns when all of it is there."""
        return f"python3 - {self.secret} {self.pieces['bait']} {self.port} {self.key} <<'PLANT'\n{IN_SANDBOX}\nPLANT"

    def found_on_host(self) -> list[str]:
        """Where on this machine its mark is."""
        found = []
        for pattern in _LOOKED_AT.split():
            for folder in [Path("/")] if pattern == "." else Path("/").glob(pattern):
                with contextlib.suppress(OSError):
                    found += [str(path) for path in folder.iterdir() if path.name.startswith(self.mark)]
        for path in _TEXTS.split():
            with contextlib.suppress(OSError):
                lines = Path(path).read_text(errors="replace").splitlines()
                found += [path for line in lines if self.mark in line and f"bait_{self.mark}" not in line]
        return found


IN_SANDBOX = r"""
import ctypes, os, socket, sys, time
secret, bait, port, key = sys.argv[1:]
for path in (f"/tmp/{bait}", f"/dev/shm/{bait}", os.path.expanduser(f"~/{bait}"), bait):
    with open(path, "w") as file:
        file.write(secret)
reading, writing = os.pipe()
if os.fork():
    os.read(reading, 1)
    os._exit(0)
os.setsid()
nothing = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(nothing, fd)
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(int(key), ctypes.c_size_t(4096), 0o1666)
if number >= 0:
    ctypes.memmove(libc.shmat(number, None, 0), secret.encode(), len(secret))
servers = [socket.socket(), socket.socket(socket.AF_UNIX)]
servers[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
servers[0].bind(("127.0.0.1", int(port)))
servers[1].bind("\0" + bait)
for server in servers:
    server.listen()
if not os.fork():
    os.execve("/bin/sh", ["sh", "-c", "sleep 60; :", secret], os.environ | {"BAIT": secret})
os.write(writing, b"x")
import selectors
guests = selectors.DefaultSelector()
for server in servers:
    guests.register(server, selectors.EVENT_READ)
end = time.monotonic() + 60
while time.monotonic() < end:
    for key, _ in guests.select(1):
        guest, _ = key.fileobj.accept()
        guest.sendall(secret.encode())
        guest.close()
"""


@contextlib.asynccontextmanager
async def on_host(bait: Bait) -> AsyncIterator[None]:
    """Plant it on this machine, and take all of it away again.

    Raises:
        OSError: something could not be planted.
    """
    name, secret = bait.pieces["bait"], bait.secret

    def welcome(_: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
        bait.num_guests += 1
        guest.write(secret.encode())
        guest.close()

    files = [Path(folder) / name for folder in (tempfile.gettempdir(), "/dev/shm", Path.home())]
    async with contextlib.AsyncExitStack() as stack:
        tcp = await asyncio.start_server(welcome, "127.0.0.1", 0)
        bait.port = tcp.sockets[0].getsockname()[1]
        for server in (tcp, await asyncio.start_unix_server(welcome, f"\0{name}")):
            stack.callback(server.close)
        for path in files:
            stack.callback(path.unlink, missing_ok=True)
            path.write_text(secret)
        process = subprocess.Popen(
            [sys.executable, "-c", f"import time; time.sleep({_LIFETIME_S})", secret], env=os.environ | {"BAIT": secret}
        )
        stack.callback(_end, process)
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def settings() -> dict[str, str]:
    """What of the machine's state no sandbox may change: kernel settings by path, and the clock's lead."""
    found = {"the clock": f"{(time.time() - time.monotonic()) / 10:.0f}"}
    for path in _SETTINGS.split():
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_text()
    return found
