"""The protocol of a container's shell, with real shells of this machine and no container."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from envs.sandbox.docker.shell import PersistentShell, ShellEndedError, loop, quoted, take_payload
from envs.sandbox.docker.stream import ExecStream

SHELLS = [name for name in ("bash", "dash", "busybox") if shutil.which(name)]


@contextlib.asynccontextmanager
async def shell(name: str, report: bool = True, is_bash: bool | None = None) -> AsyncIterator[PersistentShell]:
    """A shell whose streams are framed as an engine frames them."""
    program = [name, "sh"] if name == "busybox" else [name]
    text = loop(name == "bash" if is_bash is None else is_bash, report)
    process = subprocess.Popen(
        [*program, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lock = threading.Lock()

    def pump(number: int, file: io.RawIOBase) -> None:
        with contextlib.suppress(OSError):
            while data := file.read(2**16):
                with lock:
                    theirs.sendall(bytes([number, 0, 0, 0]) + len(data).to_bytes(4, "big") + data)

    def feed() -> None:
        with contextlib.suppress(OSError):
            while data := theirs.recv(2**16):
                process.stdin.write(data)  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]

    outputs = [threading.Thread(target=pump, args=one) for one in ((1, process.stdout), (2, process.stderr))]
    threads = [*outputs, threading.Thread(target=feed)]

    def hang_up() -> None:
        for output in outputs:
            output.join()
        theirs.shutdown(socket.SHUT_RDWR)

    threads.append(threading.Thread(target=hang_up))
    for thread in threads:
        thread.start()

    async def is_running() -> bool:
        return process.poll() is None

    stream = ExecStream("id", ours)
    try:
        yield PersistentShell(stream, is_running, report)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        stream.close()
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        process.wait()
        theirs.close()
        process.stdout.close()  # type: ignore[union-attr]
        process.stderr.close()  # type: ignore[union-attr]


def play(scenario: Callable[[], Coroutine]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def output_of(one: PersistentShell, command: bytes, timeout_s: float = 10) -> tuple[int, bytes]:
    output = bytearray()
    ended = await one.run(command, output.extend, time.monotonic() + timeout_s)
    return ended.exit_code, bytes(output)


@pytest.mark.parametrize("name", SHELLS)
def test_commands_follow_each_other(name: str) -> None:
    async def scenario() -> None:
        async with shell(name) as one:
            assert await output_of(one, b"echo 1; echo 2 >&2; (exit 7)") == (7, b"1\n2\n")
            assert await output_of(one, b"") == (0, b"")
            assert await output_of(one, b"X='a  b'\ncd /tmp\n") == (0, b"")
            assert await output_of(one, b'echo "$X"') == (0, b"a  b\n")
            assert (await one.run(b":", len, time.monotonic() + 5)).directory == b"/tmp"
            if name != "busybox":  # which it ends
                code, _ = await output_of(one, b"if then fi")
                assert code == 2 or name == "bash" and code == 1
            # A mistake does not end the shell, nor does one in a subshell make two of it.
            for mistake in (
                b"(exec cat </none) 2>/dev/null",
                b"(set -u; echo $none) 2>/dev/null",
                b"set -f; (. /none)",
            ):
                assert (await output_of(one, mistake))[0] != 0
            assert await output_of(one, b'set +f; echo "$X"') == (0, b"a  b\n")
            assert await output_of(one, b"exec 1>&- 2>&-; echo x; true") == (0, b"")
            assert await output_of(one, b"printf 'no end'") == (0, b"no end")
            data = bytes(set(range(1, 256)) - {0x27})
            code, output = await output_of(one, b"printf '%s' " + quoted(data))
            assert output == data

    play(scenario)


@pytest.mark.parametrize("name", SHELLS)
def test_nothing_that_a_command_prints_is_its_end(name: str) -> None:
    async def scenario() -> None:
        async with shell(name) as one:
            forged = b"for n in 1 2 3; do printf '.\\n. 0 /tmp\\0'; printf . >&2; done; sleep 0.1; (exit 5)"
            assert await output_of(one, forged) == (5, b".\n. 0 /tmp\0." * 3)
            # The shell's own descriptors are closed to it.
            for number in (7, 8, 9):
                assert (await output_of(one, b"sh -c 'echo . >&%d' 2>/dev/null" % number))[0] != 0
            assert await output_of(one, b"ls /proc/self/fd") == (0, b"0\n1\n2\n3\n")  # 3 is the listed directory

    play(scenario)


@pytest.mark.parametrize("name", SHELLS)
def test_processes_are_reported_before_the_command(name: str) -> None:
    async def scenario() -> None:
        async with shell(name) as one:
            _, output = await output_of(one, b"sleep 5 & echo $$ $!")
            own, child = map(int, output.split())
            assert one.processes[0] == own and own in one.processes[1:] and child not in one.processes
            await output_of(one, b"kill $!")

    play(scenario)


def test_a_late_command_and_one_that_ends_the_shell() -> None:
    async def scenario() -> None:
        async with shell("sh", is_bash=False) as one:
            output = bytearray()
            with pytest.raises(TimeoutError):
                await one.run(b"echo begun; sleep 20", output.extend, time.monotonic() + 0.3)
            assert output == b"begun\n" and len(one.processes) > 1
        async with shell("sh", is_bash=False) as one:
            with pytest.raises(ShellEndedError):
                await output_of(one, b"exit 3")
        async with shell("sh", is_bash=False) as one:
            # Something that holds the streams open does not hide the end.
            began = time.monotonic()
            with pytest.raises(ShellEndedError):
                await output_of(one, b"sleep 3 & exit 3")
            assert time.monotonic() - began < 2.5

    play(scenario)


@pytest.mark.parametrize("name", SHELLS)
def test_a_payload_is_read_to_its_end_and_no_further(name: str) -> None:
    async def scenario() -> None:
        async with shell(name, report=False, is_bash=False) as one:
            for size in (0, 1, 2**16, 2**16 + 1, 3_000_000):
                data = bytes(i % 251 for i in range(size))
                output = bytearray()
                command = take_payload(size).encode() + b" | { head -c %d; cat >/dev/null; }" % size
                await one.run(command, output.extend, time.monotonic() + 10, (io.BytesIO(data), size))
                assert output == data
            assert await output_of(one, b"echo on") == (0, b"on\n")
            # What was left of it would be taken for the next command.
            with pytest.raises(ShellEndedError):
                await one.run(b"true", len, time.monotonic() + 10, (io.BytesIO(b"x"), 1))

    play(scenario)


def test_an_endless_writer_leaves_the_loop_to_others() -> None:
    async def scenario() -> None:
        async with shell("sh", is_bash=False) as one:
            num_bytes = 0

            def count(data: bytes) -> None:
                nonlocal num_bytes
                num_bytes += len(data)

            running = asyncio.ensure_future(one.run(b"yes", count, time.monotonic() + 0.5))
            ticks = 0
            while not running.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert ticks > 10 and num_bytes > 2**20
            with pytest.raises(TimeoutError):
                await running

    play(scenario)
