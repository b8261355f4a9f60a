"""The proxy's process: mitmproxy with our rules. Runs in the environment that the set-up makes for it.

    owner (the backend's process: client.py)
    `- this process, which ends when its owner does
         control socket: `begin`, `detach` from the owner; `attach` from fork servers, with a sandbox's sockets, or
         `carry` from the owner, with a stream of them (carried.py); counts and outages to it
         forward.py takes the sandboxes' connections  ->  SOCKS5 on loopback  ->  mitmproxy  ->  the network

Names are resolved here and nowhere else, in the event loop: every connection that mitmproxy opens asks it for the
address, so that no answer of DNS can lead to this machine or its network after the rules have been asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from mitmproxy import options, version  # pyright: ignore[reportMissingImports] - of the environment of its own
from mitmproxy.tools.dump import DumpMaster  # pyright: ignore[reportMissingImports]

from envs.egress import authority, journal, names, policy
from envs.egress.addon import Addon
from envs.egress.carried import Carried
from envs.egress.forward import Gate, Settings
from envs.egress.resolver import Resolver

_CONTROL_BYTES = 2**16


class Server:
    """The control socket: sandboxes come and go."""

    def __init__(self, control: socket.socket, rules: policy.Policy, addon: Addon, settings: Settings) -> None:
        """Of one proxy; `control` is the owner's."""
        self._control, self._addon, self._settings = control, addon, settings
        self._gates: dict[str, Gate | Carried] = {}
        self._policy = rules
        self.port = 0
        self.is_over = asyncio.Event()
        self.was_killed = False
        """Whether the owner has gone without a word, and cannot clean up."""

    def on_message(self) -> None:
        """Read what came. Supervisors have this socket for a moment, before anything else runs in their sandbox."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _CONTROL_BYTES, 8)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        request = json.loads(data) if data else {"op": "killed", "id": ""}
        name = request["id"]
        if request["op"] in ("close", "killed"):
            self.was_killed = request["op"] == "killed"
            self.is_over.set()
        elif request["op"] == "begin":
            self._addon.begin(name, request["before"])
        elif request["op"] == "attach":
            self._gates[name] = Gate(name, fds, self._addon.password, self.port, self._knows, self._settings)
        elif request["op"] == "carry":
            self._gates[name] = Carried(name, fds[0], self._addon.password, self.port, self._knows, self._settings)
        elif self._addon.knows(name):
            if gate := self._gates.pop(name, None):
                gate.close()
            self._say({"id": name, "counts": self._addon.end(name)})

    def on_outage(self, name: str, reason: str) -> None:
        """Tell the owner, before the program can see it."""
        self._say({"id": name, "outage": reason})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())

    def _knows(self, name: str) -> bool:
        """Whether a name gets an address: those of the internet do, and those of rules."""
        return names.is_name(name) or policy.has_rule(self._policy, name)


def end_with(owner: int, folder: Path) -> None:
    """End this process when its owner has ended, whatever the event loop is at, and take its files along."""
    pidfd = os.pidfd_open(owner)

    def watch() -> None:
        ended = select.poll()  # select(2) knows no descriptor beyond 1023
        ended.register(pidfd, select.POLLIN)
        ended.poll()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != owner:
        os._exit(0)


async def serve(control: socket.socket, settings: dict[str, Any], rules: policy.Policy) -> None:
    """Serve until the owner hangs up."""
    folder = Path(settings["folder"])
    certificate, subject = authority.make_authority(folder, rules.organisation)
    gates = Settings(rules.connections, rules.timeout_s)
    log = journal.Journal(settings["log"])
    addon = Addon(rules, settings["headers"], log, settings["label"], gates)
    version.MITMPROXY = "proxy"  # of its few pages of its own
    master = DumpMaster(options.Options(confdir=str(folder)), with_termlog=False, with_dumper=False)
    master.options.update(
        mode=["socks5@127.0.0.1:0"],
        proxyauth="any",
        ssl_verify_upstream_trusted_ca=authority.trusted(folder, rules.upstream_ca),
        http2=False,
        rawtcp=False,
        websocket=False,
        connection_strategy="lazy",
        upstream_cert=False,
        onboarding=False,
        body_size_limit=str(rules.body_bytes),
    )
    master.addons.add(addon)
    server = Server(control, rules, addon, gates)
    addon.on_outage, gates.on_stalled = server.on_outage, addon.stalled
    running = asyncio.create_task(master.run())
    ports: list[int] = []
    while not ports:
        if running.done():
            await running
            raise OSError("mitmproxy ended while it started")
        await asyncio.sleep(0.01)
        ports = [address[1] for each in master.addons.get("proxyserver").servers for address in each.listen_addrs]
    server.port = ports[0]
    control.send(json.dumps({"certificate": certificate, "hash": subject}).encode())
    asyncio.get_running_loop().add_reader(control, server.on_message)
    over = asyncio.create_task(server.is_over.wait())
    await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
    if server.was_killed:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Become the proxy of `argv[1]` (the owner's PID) on the control socket `argv[2]`."""
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    settings = json.loads(control.recv(2**22))
    folder = Path(settings["folder"])
    end_with(int(sys.argv[1]), folder)
    control.setblocking(False)
    rules = policy.read_policy(settings["policy"])
    try:
        with asyncio.Runner(loop_factory=lambda: Resolver(rules)) as runner:
            runner.run(serve(control, settings, rules))
    except Exception as e:  # noqa: BLE001 - the owner must learn why
        with contextlib.suppress(OSError):
            control.send(json.dumps({"error": f"{type(e).__name__}: {e}"}).encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
