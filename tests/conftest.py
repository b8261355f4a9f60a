"""What every test shares: one thread, no network, unit tests first, and nothing may outlive the tests.

Whatever a test starts inherits a marker in its environment. At the end of the session every process that still carries
it, and every shared-memory segment, temporary folder, cgroup or mount of ours that nobody else uses, is an error.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer.identity import start_time

# Before anything imports torch: two OpenMP threads a process on two cores run up to 50 times slower than one.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    RAY_USAGE_STATS_ENABLED="0",
    WANDB_MODE="disabled",
)
# A shell that starts the tests in the background has them ignore Ctrl-C, and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
MARKER = "COMPOSER_TEST_SESSION"
os.environ[MARKER] = uuid.uuid4().hex
GRACE_S = 10.0
"""How long processes that are already ending (Ray's daemons, a killed sandbox) have to be gone."""

ORDER = ("unit", "integration", "benchmarks")
REPO = Path(__file__).resolve().parents[1]
ENGINE_S = 240.0
"""For a Docker engine to be installed and started."""
MOST_DESCRIPTORS = 64
"""By which a file of tests may leave more open than it found: what libraries keep from their first use on."""
NO_ENGINE = pytest.StashKey[str]()
NO_EGRESS = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first, and skip what this machine has no hardware for."""
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> tuple[int, bool, bool]:
        # Whole runs last, and before them what talks to Docker, whose client has threads. Within a folder the order is
        # kept: ranks are forked from this process, which no longer works once an engine has run in it.
        parts = item.path.relative_to(tests).parts
        is_whole = len(parts) == 2 and parts[0] == "integration"
        has_threads = item.get_closest_marker("docker") is not None
        return ORDER.index(parts[0]) if parts[0] in ORDER else -1, is_whole, has_threads

    items.sort(key=rank)
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def forks_ranks(item: pytest.Item) -> bool:
    """Whether a test's module forks ranks from this process, which must then have no thread but one."""
    module = getattr(item, "module", None)
    return any(getattr(value, "__name__", "") == "run_ranks" for value in vars(module).values()) if module else False


@pytest.fixture(scope="session")
def docker_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a Docker engine: the one that is there, or one of the tests' own, which ends with them."""
    # Its client has threads, and a process that has had some is not forked any more.
    items = request.session.items
    first = next(number for number, item in enumerate(items) if item.get_closest_marker("docker"))
    later = [item.nodeid for item in items[first:] if forks_ranks(item)]
    assert not later, f"tests that fork ranks have to come before those that talk to Docker: {later[:3]}"
    for address in (os.environ.get("DOCKER_HOST"), "unix:///run/docker.sock"):
        if address and answers(address):
            yield address
            return
    script, folder = REPO / ".ci" / "docker.sh", Path(tempfile.gettempdir()) / f"composer-engine.{os.getpid()}"
    try:
        yield start_engine(script, folder, request.config)
    finally:
        subprocess.run([script, "stop", folder], check=True, timeout=120)


@pytest.fixture(scope="session")
def docker_image() -> str:
    """An image with Python and pytest, made of this machine's programs."""
    from tests.integration.envs.sandbox.docker_image import root_file_system

    return f"tarball:{root_file_system()}"


@pytest.fixture(scope="session")
def small_docker_image() -> str:
    """An image with coreutils, tar and a POSIX shell, without bash and Python."""
    from tests.integration.envs.sandbox.docker_image import root_file_system

    return f"tarball:{root_file_system(full=False)}"


def start_engine(script: Path, folder: Path, config: pytest.Config, *more: str) -> str:
    """Start an engine, or skip and remember why, for the last lines of the session."""
    try:
        started = subprocess.run([script, "start", folder, *more], capture_output=True, text=True, timeout=ENGINE_S)
        said, code = (started.stderr.strip().splitlines() or ["it said nothing"])[-1], started.returncode
    except subprocess.TimeoutExpired:
        said, code = f"no Docker engine for tests: none was there after {ENGINE_S:g} s", 3
    if code == 3:
        config.stash[NO_ENGINE] = said
        pytest.skip(said)
    assert code == 0, said
    return started.stdout.strip()


def answers(address: str) -> bool:
    """Whether an engine is there. Leaves no thread behind."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.APIClient(address, timeout=5)
        client.ping()
        client.close()
    except (DockerException, OSError):
        return False
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in plain sight that the Docker backend, or the network of sandboxes, went untested, and why."""
    if said := config.stash.get(NO_EGRESS, ""):
        terminalreporter.section("the network of sandboxes (egress) was NOT tested", yellow=True, bold=True)
        terminalreporter.line(said)
        terminalreporter.line("Where pip can reach a package index: EGRESS=1 make setup; and curl(1) has to be there")
    if said := config.stash.get(NO_ENGINE, ""):
        terminalreporter.section("the Docker backend was NOT tested", yellow=True, bold=True)
        terminalreporter.line(said)
        terminalreporter.line("With an engine that this user may use: DOCKER_HOST=<its address> make test")
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section(f"{reasons.total()} tests were skipped", yellow=True, bold=True)
    for reason, number in sorted(reasons.items()):
        terminalreporter.line(f"skipped {number}: {reason}")


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a file of tests, was skipped, in one line."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(said.removeprefix("Skipped: ").split())


def marked_processes() -> dict[int, str]:
    """Processes that this session started and that live: pid -> command line and the test that started it."""
    marker = f"{MARKER}={os.environ[MARKER]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if marker not in variables or int(folder.name) == os.getpid():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if not command:  # a zombie, or gone while we looked
                continue
            ours = f"PPid:\t{os.getpid()}\n" in (folder / "status").read_text()
            if ours and "multiprocessing.resource_tracker" in command:  # Python's own helper, which ends with us
                continue
            test = next((v.decode() for v in variables if v.startswith(b"PYTEST_CURRENT_TEST=")), "")
            found[int(folder.name)] = f"{command.strip()[:200]} ({test or 'started outside a test'})"
        except OSError:
            continue
    return found


def traces() -> set[str]:
    """Shared-memory segments, semaphores, temporary folders, cgroups and mounts with our name or Python's."""
    found = {str(p) for name in ("composer*", "sem.*", "vllm*") for p in Path("/dev/shm").glob(name)}
    # composer-sandbox-<uid> itself is the sandboxes' register, which all runs of a user share.
    found |= {str(p) for name in ("composer-[!s]*", "composer-s*/*") for p in Path(tempfile.gettempdir()).glob(name)}
    # Path.glob stops at a group that somebody removes meanwhile.
    found |= {f"{at}/{n}" for at, names, _ in os.walk("/sys/fs/cgroup") for n in names if n.startswith("composer")}
    mounts = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return found | {mount for mount in mounts if "/composer-" in mount}


def runs_for_others(word: bytes, ours: set[int]) -> bool:
    """Whether a process that this session did not start has the word in its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) not in {*ours, os.getpid()} and word in (folder / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def used_by_others(trace: str, ours: set[int]) -> bool:
    """Whether a process that this session did not start owns, maps, opens or lives in `trace`: not ours then."""
    # <name>.<pid>.<start time or a random word>, or what lies below an engine's folder
    owner = re.search(r"[.-](\d+)[.-]\w+$", trace) or re.search(r"/composer-\w+\.(\d+)(?:/|$)", trace)
    if owner and int(owner[1]) not in {*ours, os.getpid()} and start_time(int(owner[1])) is not None:
        return True
    if trace.startswith("/sys/fs/cgroup"):
        if engine := re.search(r"/composer-engine-\d+", trace):
            return runs_for_others(engine[0].encode(), ours)
        try:
            members = {int(line) for f in Path(trace).glob("**/cgroup.procs") for line in f.read_text().split()}
        except OSError:
            return False
        return bool(members - ours)
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in ours or int(folder.name) == os.getpid():
            continue
        try:
            opened = (str(link.readlink()) for link in (folder / "fd").iterdir())
            if trace in (folder / "maps").read_text() or any(path.startswith(trace) for path in opened):
                return True
        except OSError:
            continue
    return False


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher would set for one rank, for a test that trains in its own process."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)


def descriptors() -> dict[int, str]:
    """This process's open file descriptors: number -> what it is of."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            found[int(link.name)] = str(link.readlink())
    return found


def close_databases() -> None:
    """Close what MLflow's clients in this process have open: five descriptors a database, to the process's end."""
    if module := sys.modules.get("mlflow.store.tracking.sqlalchemy_store"):
        for engine in module.SqlAlchemyStore._engine_map.values():
            engine.dispose()


@pytest.fixture(scope="module", autouse=True)
def descriptors_are_closed() -> Iterator[None]:
    """Fail a file of tests that leaves descriptors open: a process that runs for long would die of it."""
    before = descriptors()
    yield
    close_databases()
    deadline = time.monotonic() + GRACE_S
    while len(left := descriptors()) - len(before) > MOST_DESCRIPTORS and time.monotonic() < deadline:
        gc.collect()  # transports that an event loop left behind
        time.sleep(0.2)
    more = len(left) - len(before)
    kinds = Counter(re.sub(r"\d+", "N", what) for number, what in left.items() if before.get(number) != what)
    assert more <= MOST_DESCRIPTORS, f"these tests left {more} descriptors open, among them: {kinds.most_common(5)}"


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_tests() -> Iterator[None]:
    """Fail the session if a process, shared-memory segment, cgroup or mount is left behind."""
    before = traces()
    yield
    deadline = time.monotonic() + GRACE_S
    while True:
        processes = marked_processes()
        left = {t for t in traces() - before if not used_by_others(t, set(processes))}
        if not (processes or left) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    lines = [f"  process {pid}: {what}" for pid, what in sorted(processes.items())] + [f"  {t}" for t in sorted(left)]
    assert not lines, "the tests left behind:\n" + "\n".join(lines)
