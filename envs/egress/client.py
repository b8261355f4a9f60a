"""The owner's end of a proxy: starts it, hands its control socket to sandboxes, and hears when it has ended.

The proxy runs on a Python of its own, since mitmproxy asks for other versions of many packages than vLLM and MLflow do.
`.ci/setup.sh` makes that environment beside the product's; EGRESS_VENV names another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer.contract import Finding, SandboxLimits
from composer.errors import ConfigError, SandboxStartError
from envs.egress.journal import file_name
from envs.egress.policy import Policy, read_date, read_policy
from envs.sandbox.state import State, start_time

VENV_VARIABLE = "EGRESS_VENV"
_PROXY = Path(__file__).with_name("proxy.py")
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_PACKET_BYTES = 2**16
_ERRORS = "errors"
"""File of what the proxy says before it can speak."""


def venv() -> Path:
    """Where the proxy's environment is, or would be."""
    return Path(os.environ.get(VENV_VARIABLE) or Path(sys.prefix) / "egress")


def is_installed() -> bool:
    """Whether the set-up has made that environment."""
    return (venv() / ".complete").is_file() and (venv() / "bin/python").exists()


def finding(required: bool) -> Finding:
    """What `composer doctor` says of it."""
    if is_installed():
        return Finding("egress proxy", True, f"mitmproxy is in {venv()}", required=required)
    return Finding(
        "egress proxy",
        False,
        f"there is no mitmproxy in {venv()}: sandboxes can have no network, which is what they have by default",
        "where pip can reach a package index: EGRESS=1 make setup",
        required,
    )


def make_proxy(values: Any, label: str, run_folder: str, on_outage: Callable[[str | None, str], None]) -> Proxy:
    """A proxy for what a config says; else as `Proxy`.

    Raises:
        ConfigError: it says something that cannot be, or names a file that is not there.
    """
    policy = read_policy(values, "env.sandbox.args.egress")
    if policy.upstream_ca and not Path(policy.upstream_ca).expanduser().is_file():
        remedy = "there is no such file: name one with certificates"
        raise ConfigError("env.sandbox.args.egress.upstream_ca", policy.upstream_ca, remedy)
    return Proxy(policy, label, run_folder, on_outage)


def _log_folder(given: str, run_folder: str) -> Path:
    """Where the log goes."""
    if given:
        return Path(given).expanduser().absolute()
    if run_folder:
        return Path(run_folder).absolute() / "egress"
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "composer/egress"
    except RuntimeError:
        remedy = "this user has no home for the log: name a folder"
        raise ConfigError("env.sandbox.args.egress.log", "", remedy) from None


class Proxy:
    """One proxy, of one backend. May be used from one event loop after another, not from two at once."""

    def __init__(
        self, policy: Policy, label: str, run_folder: str, on_outage: Callable[[str | None, str], None]
    ) -> None:
        """Nothing starts before `ready`.

        Args:
            policy: what sandboxes may ask for.
            label: of the run.
            run_folder: of the run; "": there is none.
            on_outage: called with a sandbox's name and the reason when an allowed host could not be reached from it,
                and with None when the proxy has ended by itself: such sandboxes cannot go on.
        """
        self.policy, self._label, self._on_outage = policy, label, on_outage
        self.log = _log_folder(policy.log, run_folder) / file_name(label, os.getpid())
        """Where requests are written down."""
        self.root: tuple[str, str] | None = None
        """The certificate (PEM) that sandboxes are to trust, and OpenSSL's hash of its subject; None before `ready`."""
        self.counts: dict[str, dict[str, int]] = {}
        """By sandbox that has ended: requests, and of these denied and failed ones and outages; bytes."""
        self._state: State | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: asyncio.Future[str] | None = None
        self._starting: asyncio.Future[None] | None = None

    async def ready(self) -> None:
        """Start the proxy, unless it runs. May be awaited by many at a time.

        Raises:
            SandboxStartError: it is not installed, a secret's variable is not set, or it does not start.
        """
        starting = self._starting
        if starting is None or starting.done() or starting.get_loop() is not asyncio.get_running_loop():
            if self._control is not None:
                self._attach()
                if self.root is not None and self._process is not None and self._process.poll() is None:
                    return
                self._lose()
            starting = self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(starting)

    async def _start(self) -> None:
        self._end()
        headers = self._headers()
        if not is_installed():
            found = finding(True)
            raise SandboxStartError(f"egress is configured, but {found.detail}; {found.remedy}")
        try:
            self._launch(headers)
            self._answer = asyncio.get_running_loop().create_future()
            self._attach()
            async with asyncio.timeout(_START_TIMEOUT_S):
                failure = await self._answer
        except TimeoutError as e:
            self._end()
            raise SandboxStartError(f"the egress proxy was not ready after {_START_TIMEOUT_S:g} s") from e
        except OSError as e:
            self._end()
            raise SandboxStartError(f"the egress proxy cannot be started: {e}") from e
        except BaseException:
            self._end()
            raise
        if failure:
            self._end()
            raise SandboxStartError(f"the egress proxy cannot be started: {failure}")

    def _headers(self) -> dict[str, str]:
        names = {rule.header_env for rule in self.policy.rules if rule.header_env}
        for name in sorted(names):
            if not os.environ.get(name, "").strip():
                raise SandboxStartError(f"egress adds a header from the variable {name}, which is not set: export it")
        return {name: os.environ[name].strip() for name in names}

    def _launch(self, headers: dict[str, str]) -> None:
        if self._state is None:
            self._state = State.create(f"{self._label}-egress")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**21)
        self._control = ours
        settings = {
            "policy": dataclasses.asdict(self.policy),
            "headers": headers,
            "label": self._label,
            "folder": str(self._state.folder),
            "log": str(self.log),
        }
        with theirs, (self._state.folder / _ERRORS).open("wb") as errors:
            # -I: nothing of the host's environment or user is loaded.
            self._process = subprocess.Popen(
                [str(venv() / "bin/python"), "-I", str(_PROXY), str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={"PYTHONDONTWRITEBYTECODE": "1"},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.send(json.dumps(settings).encode())
        ours.setblocking(False)
        pid = self._process.pid
        self._state.record({"control_groups": [], "watchdog": pid, "watchdog_start": start_time(pid)})

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop or self._control is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._loop = loop
        loop.add_reader(self._control, self._on_message)

    def heed(self) -> None:
        """Take in what the proxy has said by now. It speaks of an outage before a program can see it."""
        if self._control is not None and self._answer is not None and self._answer.done():
            self._on_message()

    def _on_message(self) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            self._take(json.loads(data))

    def _take(self, message: dict[str, Any]) -> None:
        if "counts" in message:
            self.counts[message["id"]] = message["counts"]
            return
        if "outage" in message:
            self._on_outage(message["id"], message["outage"])
            return
        if "certificate" in message:
            self.root = message["certificate"], message["hash"]
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message.get("error", ""))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, IndexError, AttributeError):
            text = (self.folder / _ERRORS).read_text(errors="replace")
            return text.strip().splitlines()[-1][:300]
        return ""

    def _lose(self) -> None:
        was_ready = self._answer is None or self._answer.done()
        self._hang_up()
        if was_ready:
            self._on_outage(None, "the egress proxy ended under it")
        elif self._answer is not None and not self._answer.get_loop().is_closed():
            self._answer.set_result(self._last_words() or "it ended at once")

    @property
    def pid(self) -> int:
        """Of the proxy; 0: none runs."""
        return self._process.pid if self._process is not None else 0

    @property
    def folder(self) -> Path:
        """Where the root certificate's key is, outside of all sandboxes; there is one from the first `ready` on."""
        assert self._state is not None
        return self._state.folder

    def serves(self, limits: SandboxLimits) -> bool:
        """Whether a sandbox with these limits has a network.

        Raises:
            SandboxStartError: they name a date that is none.
        """
        try:
            if limits.packages_before:
                read_date(limits.packages_before)
        except ValueError:
            raise SandboxStartError(
                f"packages_before={limits.packages_before!r} must be a date such as 2024-05-01: "
                "mend the task's created_at"
            ) from None
        return limits.network or self.policy.graders

    def give(self, sandbox: str, limits: SandboxLimits) -> int:
        """Announce a sandbox; returns a descriptor of the control socket for who attaches it, and has to close it.

        Raises:
            OSError: the proxy has gone, or cannot keep up.
        """
        self._tell({"op": "begin", "id": sandbox, "before": limits.packages_before})
        assert self._control is not None
        return os.dup(self._control.fileno())

    def carry(self, sandbox: str, limits: SandboxLimits, channel: socket.socket) -> None:
        """Announce a sandbox whose connections come over a stream (`carried.py`); the caller closes its `channel`.

        Raises:
            OSError: the proxy has gone, or cannot keep up.
        """
        self._tell({"op": "begin", "id": sandbox, "before": limits.packages_before})
        assert self._control is not None
        message = json.dumps({"op": "carry", "id": sandbox}).encode()
        socket.send_fds(self._control, [message], [channel.fileno()])

    def _tell(self, message: dict[str, Any]) -> None:
        if self._control is None:
            raise ConnectionError("the egress proxy has ended")
        self._control.send(json.dumps(message).encode())

    def detach(self, sandbox: str) -> None:
        """A sandbox has ended: stop serving it. Raises nothing."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"op": "detach", "id": sandbox}).encode())

    def close(self) -> None:
        """End the proxy and remove what it had on disk, apart from the log. Idempotent; raises nothing."""
        self._end()
        state, self._state = self._state, None
        if state is not None:
            state.remove()

    def _end(self) -> None:
        self._hang_up()
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + _END_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.wait()

    def _hang_up(self) -> None:
        control, self._control = self._control, None
        if control is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(control)
        self._loop = None
        with contextlib.suppress(OSError):
            control.send(json.dumps({"op": "close", "id": ""}).encode())
            control.settimeout(_END_TIMEOUT_S)
            while data := control.recv(_PACKET_BYTES):  # of the sandboxes that ended last
                self._take(json.loads(data))
        control.close()
