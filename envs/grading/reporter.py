"""A pytest plugin that tells a grader what ran. It is shipped into the grading sandbox as source, not imported here.

Three ways, and the environment says which (`NONCE`, `COMMAND`):

Apart: no code of the agent's is in this sandbox. The plugin connects `composer_solution` to the solution, which is what
standard input and output lead to, and prints the report at the end.

Together: the code under test runs in the process of the tests. Before any of it does, the process forks. The parent
becomes the supervisor: only it has the program's real output and input, no process of its user may look into it
(/proc/<pid>/fd, /proc/<pid>/mem), and it reads the nonce that makes a report genuine after the fork, so the process
that runs the tests never holds it. The child goes on as pytest and sends results through a pipe. The tests' source is
taken off the disk. All that keeps honest what is outside of the child; inside of it, results can be forged by code
that looks for this plugin's or pytest's objects.

Command: as together, but a command of the task's runs pytest, which may be of any version and must behave as it always
does: output and files stay as they are. What the supervisor adds is the exit code, which is 0 only if every collected
test ran and did not fail, and the report, if its nonce is the first thing in standard input. Whose a skip is says
origins.py, which is shipped with it.

It needs the standard library only.
"""

import atexit
import importlib
import json
import os
import sys

READY = b"composer-grading-ready"
NONCE = "COMPOSER_GRADING_NONCE"
COMMAND = "COMPOSER_GRADING_COMMAND"
"""`on` in the process that a command starts; `off` in those below, which have nothing to report."""
ORIGINS, TESTS = "_origins", "_tests.json"
"""What the name goes on with of origins.py, and of the list of the digests of the tests' files."""
NONCE_LENGTH = 32
MAX_MESSAGE = 300
MAX_REASONS = 20
_PR_SET_DUMPABLE = 4
_NONCE_S = 1.0
_WORKER = "PYTEST_XDIST_WORKER"
_CHILD_S = 10.0
_NOT_RUNNING_TESTS = {"--version", "-V", "--help", "-h", "--collect-only", "--co", "--fixtures", "--markers"}


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


class CommandReporter(Reporter):
    """The same, with what tells an exit code's worth, and pytest's own way to show failures."""

    def __init__(self, send, witness):
        """`witness` knows the tests' files (origins.py)."""
        super().__init__(send)
        self._witness = witness

    def pytest_collection_finish(self, session):
        """What is about to run, and what of it is not the tests' own."""
        super().pytest_collection_finish(session)
        for item in self._witness.changed(session.items):
            event = {"id": item.nodeid, "when": "collect", "outcome": "failed", "expected": False, "where": ""}
            self._send({**event, "message": "its file was changed before it was loaded"})

    def pytest_configure(self, config):
        """Leave everything as it is."""

    def pytest_collectreport(self, report):
        """A file that cannot be collected, or that is skipped, and by whom."""
        if not report.passed:
            self._send({**_seen(report), "when": "collect"})

    def pytest_runtest_logreport(self, report):
        """A phase of a test."""
        self._send({**_seen(report), "when": report.when})

    def pytest_sessionfinish(self, session, exitstatus):
        """How pytest would end."""
        self._send({"when": "status", "status": int(exitstatus)})


def _seen(report):
    """An event of a report: where what ended it was raised, and what was said."""
    where = report.longrepr[0] if isinstance(report.longrepr, tuple) else ""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        where = crash.path
    message = "" if report.passed else _last_line(report)
    return {
        "id": report.nodeid,
        "outcome": report.outcome,
        "where": str(where),
        "message": message,
        "expected": hasattr(report, "wasxfail"),
        "of_tests": getattr(report, "of_tests", False),
        "is_raised": getattr(report, "is_raised", True),
    }


_plugins, _of_worker = [], []


def pytest_addoption(parser):
    """Begin; this is the first hook of a plugin named with `-p`, before any conftest is imported."""
    command = os.environ.get(COMMAND)
    if command == "off" and _WORKER in os.environ:
        _of_worker.append(_witness())  # of pytest-xdist, whose reports come to the process that has the reporter
    if command == "off" or (command and _NOT_RUNNING_TESTS.intersection(sys.argv)):
        return
    os.write(2, READY + b"\n")
    if command:
        witness = _witness()
        _plugins.extend([CommandReporter(_under_command(), witness), witness])
        return
    os.unlink(__file__)  # noqa: PTH108
    nonce = os.environ.pop(NONCE, "").encode()
    _plugins.append(Reporter(_apart(nonce) if nonce else _together()))


def pytest_configure(config):
    """Listen, from here on: what comes before tells nothing of a test."""
    plugins = [*_plugins, *(_of_worker if hasattr(config, "workerinput") else ())]
    _plugins.clear()  # a pytest that a test runs in this process has nothing to report
    for plugin in plugins:
        config.pluginmanager.register(plugin)


def _witness():
    """What tells the tests' own skips from others; made before any conftest is imported."""
    origins = importlib.import_module(__name__ + ORIGINS)
    with open(os.path.splitext(__file__)[0] + TESTS, encoding="utf-8") as file:  # noqa: PTH122, PTH123
        return origins.Witness(json.load(file))


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
    return _sender(writing, key)


def _sender(writing, key):
    def send(event):
        data = key + json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(writing, data) :]

    return send


def _under_command():
    """Fork; returns, in the child, what takes events. The parent ends as pytest would, if that is believable."""
    key = os.urandom(16).hex().encode()
    reading, writing = os.pipe()
    may_go, go = os.pipe()
    _set_dumpable(False)
    child = os.fork()
    if child:
        os.close(writing)
        os.close(may_go)
        nonce = _nonce()
        os.close(go)
        _supervise_command(child, reading, key, nonce)
    os.close(reading)
    os.close(go)
    os.read(may_go, 1)  # until nobody can find the nonce any more
    os.close(may_go)
    _set_dumpable(True)
    _close_streams(0)
    # What the code under test starts is none of ours.
    os.environ[COMMAND] = "off"
    return _sender(writing, key)


def _nonce():
    """What the first thing in standard input is; empty if there is none."""
    import select

    data = b""
    while len(data) < NONCE_LENGTH and select.select([0], [], [], _NONCE_S)[0]:
        chunk = os.read(0, NONCE_LENGTH - len(data))
        if not chunk:
            break
        data += chunk
    return data if len(data) == NONCE_LENGTH else b""


def _supervise_command(child, reading, key, nonce):
    """Collect the child's results, wait for it, print the report, and exit."""
    import time

    events = _events(reading, key)
    end, status = time.monotonic() + _CHILD_S, None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        if status is None:
            time.sleep(0.005)
    report = judge(events)
    if report["problem"]:
        os.write(2, b"\n" + report["problem"].encode(errors="replace") + b"\n")
    if nonce:
        _print_report(1, nonce, report)
    os._exit(report["status"])


def judge(events):
    """What events of a command's pytest are worth.

    Returns:
        found: node id -> whether the test passed; skipped ones are left out, as are those that did not run.
        reasons: the first failures, in words.
        problem: why an exit code of 0 would not be believed; empty if it would.
        status: the exit code.
    """
    found, skipped, reasons, problem = {}, set(), [], ""
    tests = [event for event in events if event["when"] in ("collect", "setup", "call", "teardown")]
    for event in tests:
        name, outcome = event["id"], event["outcome"]
        is_foreign = outcome != "failed" and (outcome == "skipped" or event["expected"]) and not event["of_tests"]
        if outcome == "failed" or is_foreign:
            found[name] = False
            reasons.append(": ".join([name, outcome + " in " + event["when"], event["message"]]))
        if is_foreign:
            problem = problem or name + " was skipped by what it tests, " + event["where"]
        elif event["expected"] and outcome != "failed" and not event["is_raised"]:
            found.setdefault(name, True)  # as for pytest
        elif outcome == "skipped":
            skipped.add(name)  # an expected failure, too, that says no more of the solution than a skip
        elif outcome == "passed" and event["when"] == "call":
            found.setdefault(name, True)
    collected = {name for event in events if event["when"] == "collected" for name in event["ids"]}
    statuses = [event["status"] for event in events if event["when"] == "status"]
    missing = collected - found.keys() - skipped
    if not statuses or not any(event["when"] == "end" for event in events):
        problem = problem or "pytest's process ended before its tests did"
    elif missing:
        problem = problem or str(len(missing)) + " of the tests did not run, " + min(missing) + " among them"
    elif not statuses[-1] and not all(found.values()):
        problem = problem or "tests failed, and pytest would have ended with 0"
    status = (statuses or [1])[-1] or int(bool(problem))
    return {"found": found, "reasons": reasons[:MAX_REASONS], "problem": problem, "status": status}


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
    events = _events(reading, key)
    _print_report(1, sys.stdin.buffer.read(NONCE_LENGTH), events)
    os._exit(0)


def _events(reading, key):
    """What the child sends, up to its end."""
    events = []
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if line.startswith(key):
                events.append(json.loads(line[len(key) :]))
                if events[-1]["when"] == "end":
                    break
    return events


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
