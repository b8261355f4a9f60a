"""A pytest plugin that tells a grader what ran. It is shipped into the grading sandbox as source, not imported here.

Two ways, and the environment says which (`NONCE`):

Apart: no code of the agent's is in this sandbox. The plugin connects `composer_solution` to the solution, which is what
standard input and output lead to, and prints the report at the end.

Together: the code under test runs in the process of the tests. Before any of it does, the process forks. The parent
becomes the supervisor: only it has the program's real output and input, no process of its user may look into it
(/proc/<pid>/fd, /proc/<pid>/mem), and it reads the nonce that makes a report genuine after the fork, so the process
that runs the tests never holds it. The child goes on as pytest and sends results through a pipe. The tests' source is
taken off the disk. All that keeps honest what is outside of the child; inside of it, results can be forged by code
that looks for this plugin's or pytest's objects.

It needs the standard library only.
"""

import atexit
import json
import os
import sys

READY = b"composer-grading-ready"
NONCE = "COMPOSER_GRADING_NONCE"
NONCE_LENGTH = 32
MAX_MESSAGE = 300
_PR_SET_DUMPABLE = 4


class Reporter:
    """Passes on what pytest finds."""

    def __init__(self, send):
        """`send` takes one event, a dictionary."""
        self._send = send

    def pytest_configure(self, config):
        """Have failures formatted by the standard library: pytest's own way takes longer than most tests."""
        config.option.tbstyle = "native"

    def pytest_collectreport(self, report):
        """A file that cannot be collected."""
        if report.failed:
            message = _last_line(report)
            self._send({"id": report.nodeid, "when": "collect", "outcome": report.outcome, "message": message})

    def pytest_collection_finish(self, session):
        """What is about to run."""
        self._send({"when": "collected", "ids": [item.nodeid for item in session.items]})

    def pytest_runtest_logreport(self, report):
        """A phase of a test."""
        message = _last_line(report) if report.failed else ""
        self._send({"id": report.nodeid, "when": report.when, "outcome": report.outcome, "message": message})

    def pytest_unconfigure(self, config):
        """The end, reached only if nothing ended the process before."""
        self._send({"when": "end"})


def pytest_addoption(parser, pluginmanager):
    """Begin; this is the first hook of a plugin named with `-p`, before any conftest is imported."""
    os.write(2, READY + b"\n")
    os.unlink(__file__)  # noqa: PTH108
    nonce = os.environ.pop(NONCE, "").encode()
    pluginmanager.register(Reporter(_apart(nonce) if nonce else _together()))


def _apart(nonce):
    """Connect to the solution; returns what takes events."""
    import composer_solution

    out, events = os.dup(2), []
    channel = composer_solution.Channel(os.dup(0), lambda word: os.write(out, word + b"\n"), os.dup(1))
    _close_streams(0, 1)
    composer_solution.channel = channel

    def finish():
        end = {"trouble": channel.trouble, "never_started": channel.never_started, "num_calls": channel.num_calls}
        _print_report(out, nonce, [*events, {"when": "solution", **end}])

    atexit.register(finish)
    return events.append


def _together():
    """Fork; returns, in the child, what takes events."""
    key = os.urandom(16).hex().encode()
    reading, writing = os.pipe()
    _set_dumpable(False)
    if os.fork():
        os.close(writing)
        _supervise(reading, key)
    _set_dumpable(True)
    _close_streams(0, 1, 2)
    # Whatever else was inherited is the sandbox's own business, and nothing for the code under test.
    os.closerange(3, writing)
    os.closerange(writing + 1, 1024)
    _take_sources([path for path in sys.argv[1:] if path.endswith(".py")])

    def send(event):
        data = key + json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(writing, data) :]

    return send


def _set_dumpable(dumpable):
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def _close_streams(*streams):
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)


def _take_sources(paths):
    """Empty the files of the tests, and have the interpreter load them from memory."""
    from importlib.machinery import PathFinder, SourceFileLoader

    sources = {}
    for path in map(os.path.abspath, paths):
        with open(path, "rb+") as file:  # noqa: PTH123
            sources[path] = file.read()
            file.truncate(0)

    class Loader(SourceFileLoader):
        def get_data(self, path):
            return sources[path] if path in sources else super().get_data(path)

        def set_data(self, path, data, **_):
            pass

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            spec = PathFinder.find_spec(name, path, target)
            if spec is None or spec.origin is None or spec.origin not in sources:
                return None
            spec.loader = Loader(spec.name, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder)


def _supervise(reading, key):
    """Collect the child's results, print them behind the nonce, and exit without running anything else."""
    events = []
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if line.startswith(key):
                events.append(json.loads(line[len(key) :]))
                if events[-1]["when"] == "end":
                    break
    _print_report(1, sys.stdin.buffer.read(NONCE_LENGTH), events)
    os._exit(0)


def _print_report(fd, nonce, events):
    data = b"\n" + nonce + json.dumps(events).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _last_line(report):
    """Why it failed, short."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr).strip().rsplit("\n", 1)[-1][:MAX_MESSAGE]
    return f"{crash.message[:MAX_MESSAGE]} (line {crash.lineno} of {os.path.basename(crash.path)})"  # noqa: PTH119
