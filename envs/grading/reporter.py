"""A pytest plugin that tells a grader what ran. It is shipped into the grading sandbox as source, not imported here.

Before any code of the repository runs, it forks. The parent becomes the supervisor: only it has the program's real
output and input, and it reads the nonce that makes a report genuine after the fork, so the process that runs the tests
never holds it. The child goes on as pytest and sends results through a pipe. It needs the standard library only.
"""

import json
import os
import sys

READY = b"composer-grading-ready"
NONCE_LENGTH = 32
MAX_MESSAGE = 300


class Reporter:
    """Sends what pytest finds to the supervisor, in lines that start with a key both share."""

    def __init__(self, pipe, key):
        """Write to the pipe's file descriptor."""
        self._pipe, self._key = pipe, key

    def pytest_collectreport(self, report):
        """A file that cannot be collected."""
        if report.failed:
            self._send(id=report.nodeid, when="collect", outcome=report.outcome, message=_last_line(report))

    def pytest_runtest_logreport(self, report):
        """A phase of a test."""
        message = _last_line(report) if report.failed else ""
        self._send(id=report.nodeid, when=report.when, outcome=report.outcome, message=message)

    def pytest_unconfigure(self, config):
        """The end, reached only if nothing ended the process before."""
        self._send(when="end")

    def _send(self, **event):
        data = self._key + json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self._pipe, data) :]


def pytest_addoption(parser, pluginmanager):
    """Fork; this is the first hook of a plugin named with `-p`, before any conftest is imported."""
    with open(1, "wb", closefd=False) as out:  # noqa: PTH123
        out.write(READY + b"\n")
    os.unlink(__file__)  # noqa: PTH108
    key = os.urandom(16).hex().encode()
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        _supervise(reading, key)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    # Whatever else was inherited is the sandbox's own business, and nothing for the code under test.
    os.closerange(3, writing)
    os.closerange(writing + 1, 1024)
    pluginmanager.register(Reporter(writing, key))


def _supervise(reading, key):
    """Collect the child's results, print them behind the nonce, and exit without running anything else."""
    events = []
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if line.startswith(key):
                events.append(json.loads(line[len(key) :]))
                if events[-1]["when"] == "end":
                    break
    nonce = sys.stdin.buffer.read(NONCE_LENGTH)
    with open(1, "wb", closefd=False) as out:  # noqa: PTH123
        out.write(b"\n" + nonce + json.dumps(events).encode() + b"\n")
    os._exit(0)


def _last_line(report):
    """Why it failed, short."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr).strip().rsplit("\n", 1)[-1][:MAX_MESSAGE]
    return f"{crash.message[:MAX_MESSAGE]} (line {crash.lineno} of {os.path.basename(crash.path)})"  # noqa: PTH119
