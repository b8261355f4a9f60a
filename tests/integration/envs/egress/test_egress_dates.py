"""Package indexes as they were on a date: of the policy, of a rule, of a task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from composer.rollout.prepare import prepare, prepared
from composer.types import Task
from tests.integration.envs.egress.upstream import Upstream
from tests.integration.envs.egress.world import egress, status

# --- Dates ------------------------------------------------------------------------------------------------------------

FILES = [
    {"filename": "demo-1.0-py3-none-any.whl", "url": "https://files.test/p/demo-1.0-py3-none-any.whl",
     "hashes": {}, "upload-time": "2023-06-01T00:00:00Z"},
    {"filename": "demo-2.0-py3-none-any.whl", "url": "https://files.test/p/demo-2.0-py3-none-any.whl",
     "hashes": {}, "upload-time": "2024-02-01T00:00:00Z"},
    {"filename": "demo-1.5-py3-none-any.whl", "url": "../../p/demo-1.5-py3-none-any.whl", "hashes": {}},
]  # fmt: skip
PYPI = "application/vnd.pypi.simple.v1+json"


def wheel(version: str) -> bytes:
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("demo.py", f"VERSION = {version!r}\n")
        info = f"demo-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def index(upstream: Upstream) -> Upstream:
    answer = {"meta": {"api-version": "1.1"}, "name": "demo", "files": FILES, "versions": ["1.0", "1.5", "2.0"]}
    upstream.page("index.test/simple/demo/", answer, PYPI)
    for version in ("1.0", "2.0"):
        name = f"demo-{version}-py3-none-any.whl"
        upstream.page(f"files.test/p/{name}", wheel(version), "application/octet-stream")
    versions = {v: {"dist": {"tarball": f"https://registry.test/demo/-/demo-{v}.tgz"}} for v in ("1.0.0", "2.0.0")}
    times = {"created": "2020-01-01T00:00:00Z", "1.0.0": "2023-01-01T00:00:00Z", "2.0.0": "2024-06-01T00:00:00Z"}
    upstream.page(
        "registry.test/demo", {"name": "demo", "versions": versions, "time": times, "dist-tags": {"latest": "2.0.0"}}
    )
    return upstream


def test_a_python_index_is_as_it_was_on_the_date(sh: Callable, index: Upstream) -> None:
    answer = json.loads(sh(f"curl -sS -H 'Accept: {PYPI}' https://index.test/simple/demo/")[1])
    assert [file["filename"] for file in answer["files"]] == ["demo-1.0-py3-none-any.whl"]
    assert answer["versions"] == ["1.0"]
    # A program that knows HTML alone gets the same.
    page = sh("curl -sS -H 'Accept: text/html' https://index.test/simple/demo/")[1]
    assert "demo-1.0" in page and "demo-2.0" not in page and "demo-1.5" not in page
    assert {headers["accept"] for _, _, headers in index.requests} == {PYPI}
    # Nor can a file be fetched by itself.
    assert status(sh, "https://files.test/p/demo-1.0-py3-none-any.whl") == "200"
    assert status(sh, "https://files.test/p/demo-2.0-py3-none-any.whl") == "403"
    assert status(sh, "https://files.test/p/never-named-9.whl") == "403"
    assert status(sh, "https://index.test/pypi/demo/json") == "403"


def test_pip_installs_the_version_of_the_date(sh: Callable, index: Upstream) -> None:
    if sh("command -v /usr/bin/pip")[0]:
        pytest.skip("no pip(1) in the sandbox")
    code, text = sh(
        "/usr/bin/pip install --no-cache-dir --target /tmp/t --index-url https://index.test/simple demo 2>&1"
    )
    assert code == 0, text
    assert sh("cd /tmp/t && python3 -c 'import demo; print(demo.VERSION)'")[1] == "1.0\n"
    code, text = sh(
        "/usr/bin/pip install --no-cache-dir --target /tmp/u --index-url https://index.test/simple demo==2.0 2>&1"
    )
    assert code == 1 and "No matching distribution" in text


def test_an_npm_registry_is_as_it_was_on_the_date(sh: Callable, index: Upstream) -> None:
    answer = json.loads(sh("curl -sS -H 'Accept: application/vnd.npm.install-v1+json' https://registry.test/demo")[1])
    assert (list(answer["versions"]), answer["dist-tags"]) == (["1.0.0"], {"latest": "1.0.0"})
    assert status(sh, "https://registry.test/demo/-/demo-1.0.0.tgz") == "200"
    assert status(sh, "https://registry.test/demo/-/demo-2.0.0.tgz") == "403"
    assert status(sh, "https://registry.test/demo/2.0.0") == "403"


def test_an_answer_that_cannot_be_dated_is_refused(sh: Callable, upstream: Upstream) -> None:
    upstream.page("index.test/simple/odd/", b"<html>demo-9.whl</html>", "text/html")
    code, text = sh("curl -sS https://index.test/simple/odd/")
    assert "not allowed by the network policy" in text and "demo-9" not in text


# --- Of a task --------------------------------------------------------------------------------------------------------


def versions(sandbox: Any, runner: asyncio.Runner) -> list[str]:
    command = f"curl -sS -H 'Accept: {PYPI}' https://index.test/simple/demo/"
    return json.loads(runner.run(sandbox.shell(command)).output)["versions"]


def test_a_tasks_date_is_that_of_its_own_sandboxes(backend: Any, runner: asyncio.Runner, index: Upstream) -> None:
    async def start(date: str) -> Any:
        task = Task("t", "", {}, {}, metadata={"created_at": date} if date else {})
        return await prepare(task, backend, SandboxLimits())

    early, late, undated = (runner.run(start(date)) for date in ("2023-01-01", "2024-03-01T00:00:00Z", ""))
    assert versions(late, runner) == ["1.0", "2.0"]
    assert versions(early, runner) == []
    assert versions(undated, runner) == ["1.0"]
    # A file that another task's sandbox has been told of is as new as it was.
    get = "curl -sS -o /dev/null -w '%{http_code}' https://files.test/p/demo-2.0-py3-none-any.whl"
    assert [runner.run(s.shell(get)).output for s in (early, undated, late)] == [b"403", b"403", b"200"]
    for sandbox in (early, late, undated):
        runner.run(sandbox.stop())


def test_forks_and_states_keep_the_date(backend: Any, runner: asyncio.Runner, index: Upstream, tmp_path: Path) -> None:
    async def use() -> tuple[Any, Any]:
        task = Task("t", "", {}, {}, metadata={"created_at": "2024-03-01"})
        async with prepared(task, backend, SandboxLimits()) as state:
            sandbox = await state.start()
            fork = await sandbox.fork()
            snapshot = await sandbox.snapshot()
            await backend.save(snapshot, tmp_path / "state")
            return fork, await state.start_from(tmp_path / "state")

    for sandbox in runner.run(use()):
        assert versions(sandbox, runner) == ["1.0", "2.0"]
        runner.run(sandbox.stop())


def test_a_rules_date_is_the_last_of_all(make: Callable, runner: asyncio.Runner, index: Upstream, log: Path) -> None:
    policy = egress(index, log)
    policy["rules"] = [{"host": "index.test", "index": "pypi", "before": "2023-12-31"}]
    backend = make("rule", policy)
    for date, expected in (("2024-03-01", ["1.0"]), ("2023-01-01", []), ("", ["1.0"])):
        sandbox = runner.run(backend.start({}, SandboxLimits(network=True, packages_before=date)))
        assert versions(sandbox, runner) == expected, date
        runner.run(sandbox.stop())


def test_a_date_that_is_none_starts_nothing(backend: Any, runner: asyncio.Runner) -> None:
    with pytest.raises(SandboxStartError, match="packages_before='last summer' must be a date"):
        runner.run(backend.start({}, SandboxLimits(network=True, packages_before="last summer")))
