"""The shadow backend as a real process, asked over HTTP and by the tools, with real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from composer.contract import SandboxLimits
from composer.errors import ToolError
from envs.shadow.client import ShadowClient, TooLargeError, UnknownWorkspaceError
from envs.shadow.server import ShadowServer, serve
from envs.shadow.service import ShadowBackend, shared, stop_shared
from envs.tools.search import SemanticSearch, WebSearch

FILES = {
    "server/retry.py": b"class RetryPolicy:\n    def next_delay(self, attempt):\n        return 2 ** attempt\n",
    "server/cache.py": b"class Cache:\n    def evict(self, key):\n        del self.entries[key]\n",
    "docs/cache.md": b"# The cache\n\nEntries are evicted when it is full.\n",
    "binary.bin": b"evict\0",
    "latin.txt": b"evict caf\xe9",
    ".git/config": b"evict",
}
LARGE = {"workspace": "l", "files": {"a": "x" * (16 * 2**20 + 1)}, "replace": True}
PAGE = "---\nurl: https://docs.example.com/retry\ntitle: How to retry\n---\nWait twice as long each time.\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "retry.md").write_text(PAGE)
    return str(folder)


@pytest.fixture(scope="module")
def service(corpus):
    service = ShadowBackend(corpus)
    service.start()
    yield service
    service.stop()


def process_of(service: ShadowBackend) -> subprocess.Popen[bytes]:
    assert service._process is not None
    return service._process


@pytest.fixture(autouse=True)
def no_shared_service():
    yield
    stop_shared()


def ask(service, method, path, body=None, token=None, **more):
    """Status and answer of a request as anyone could make it."""

    async def work():
        headers = {"Authorization": f"Bearer {service.token if token is None else token}"}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.request(method, f"{service.url}{path}", data=data, headers=headers, **more) as response,
        ):
            return response.status, await response.json()

    return asyncio.run(work())


def test_the_service_answers(service):
    assert ask(service, "GET", "/health", token="")[1]["status"] == "ok"
    index = {"workspace": "w", "files": {"a.py": "def parse_config(): ...\n", "b.py": "x = 1\n"}, "replace": True}
    assert ask(service, "POST", "/index", index) == (200, {"files": 2, "passages": 2})
    status, answer = ask(service, "POST", "/search", {"workspace": "w", "query": "where is the config parsed"})
    (result,) = answer["results"]
    assert result.pop("score") > 0
    assert (status, result) == (
        200,
        {"path": "a.py", "start_line": 1, "end_line": 1, "text": "def parse_config(): ..."},
    )
    assert ask(service, "POST", "/index", {"workspace": "w", "files": {}, "removed": ["a.py"]})[1]["files"] == 1
    assert ask(service, "POST", "/search", {"workspace": "w", "query": "config"}) == (200, {"results": []})
    _, answer = ask(service, "POST", "/web", {"query": "how long to wait", "limit": 3})
    assert [r["url"] for r in answer["results"]] == ["https://docs.example.com/retry"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/index", b"{", 400, "the body is not JSON"),
        ("/index", b"[" * 10**5, 400, "the body is not JSON"),
        ("/index", {"workspace": "w"}, 400, "body: 'files' is a required property"),
        ("/index", {"workspace": "w", "files": {"a": 1}}, 400, "files.a: 1 is not of type 'string'"),
        ("/search", {"workspace": "w", "query": "x", "limit": 51}, 400, "limit: 51 is greater than the maximum of 50"),
        ("/search", {"workspace": "w", "query": "x" * 5000}, 400, "query: "),
        ("/search", {"workspace": "unknown", "query": "x"}, 404, "workspace='unknown': is not known"),
        (
            "/index",
            {"workspace": "l", "files": {"a": "x" * (16 * 2**20 + 1)}, "replace": True},
            413,
            "workspace='l': holds",
        ),
        ("/index", b"x" * (64 * 2**20 + 1), 413, "the body is larger than 67108864 bytes"),
        ("/nowhere", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(service, path, body, status, said):
    found, answer = ask(service, "POST", path, body)
    assert found == status and answer["error"].startswith(said)


def test_only_its_owner_may_ask(service):
    for token in ("", "wrong", service.token[:-1], "é"):
        status, answer = ask(service, "POST", "/web", {"query": "wait"}, token=token)
        assert status == 401 and "results" not in answer
    address = service.url.removeprefix("http://").split(":")
    assert address[0] == "127.0.0.1"
    others = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {
        "127.0.0.1"
    }
    for other in others:
        with pytest.raises(OSError):
            socket.create_connection((other, int(address[1])), timeout=2)


def test_a_slow_request_does_not_hold_up_others(service):
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /index HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n")
        slow.sendall(f"Authorization: Bearer {service.token}\r\n\r\n{{".encode())
        assert ask(service, "GET", "/health")[0] == 200


def test_a_request_has_a_deadline():
    async def work():
        server, ports = ShadowServer("secret", deadline_s=0.3), []
        serving = asyncio.ensure_future(serve(server, "127.0.0.1", 0, ports.append))
        while not ports:
            await asyncio.sleep(0.01)

        async def status(body):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
            writer.write(b"POST /web HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n")
            writer.write(b"Content-Length: 14\r\n\r\n" + body)
            line = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            return line.split()[1]

        try:
            slow = await status(b"{")  # the rest never comes
            server._worker.submit(time.sleep, 1)  # as another request that takes its time
            queued = await status(b'{"query": "x"}')
            await asyncio.sleep(1)
            return slow, queued, await status(b'{"query": "x"}')
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    assert asyncio.run(work()) == (b"503", b"503", b"200")


def test_a_server_for_others_or_without_a_token_is_none():
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ValueError, match="`host` must be a loopback address"):
            asyncio.run(serve(ShadowServer("secret"), host, 0, print))
    with pytest.raises(ValueError, match="`token` must not be empty"):
        ShadowServer("")


def test_it_starts_once_and_leaves_nothing(corpus):
    service = ShadowBackend(corpus)
    service.stop()
    service.start()
    pid = process_of(service).pid
    service.start()
    assert process_of(service).pid == pid and service.is_running
    service.stop()
    service.stop()
    assert not service.is_running and not Path(f"/proc/{pid}").exists()
    service.start()
    assert ask(service, "GET", "/health")[0] == 200
    service.stop()


def test_it_ends_with_its_owner_however_that_ends():
    code = (
        "import os, time; from envs.shadow.service import shared\n"
        "print(shared()._process.pid, flush=True); time.sleep(600)"
    )
    for number in (signal.SIGKILL, signal.SIGTERM):
        owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ)
        assert owner.stdout is not None
        with owner.stdout:
            pid = int(owner.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        owner.send_signal(number)
        owner.wait(10)
        deadline = time.monotonic() + 10
        while (alive := _is_alive(pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_service_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ValueError, match="`corpus` must be a folder of pages"):
        ShadowBackend(str(tmp_path / "nowhere"))
    gone = tmp_path / "gone"
    gone.mkdir()
    service = ShadowBackend(str(gone))
    gone.rmdir()
    with pytest.raises(ToolError, match="the shadow backend could not be started: error: .*gone"):
        service.start()
    assert not service.is_running


@pytest.fixture(scope="module")
def sandboxes(runner, backend):
    """Run a coroutine function with a fresh sandbox."""

    def run(work, files=FILES):
        async def inside():
            sandbox = await backend.start(files, SandboxLimits())
            try:
                return await work(sandbox)
            finally:
                await sandbox.stop()

        return runner.run(asyncio.wait_for(inside(), 120))

    return run


def test_semantic_search_sees_the_files_as_they_are(sandboxes):
    tool = SemanticSearch(max_results=2)

    async def work(sandbox):
        async def search(query, **more):
            return (await tool.call({"query": query, **more}, sandbox)).content

        first = await search("how long until the next retry attempt")
        both = await search("evict an entry from the cache")
        narrow = await search("evict an entry from the cache", path="./docs/")
        absolute = await search("evict", path=f"{sandbox.workdir}/server")
        await sandbox.shell("rm docs/cache.md; echo 'def evict_cache_entry(): pass' > new.py")
        changed = await search("evict an entry from the cache")
        nothing = await search("qwertyuiop")
        return first, both, narrow, absolute, changed, nothing

    first, both, narrow, absolute, changed, nothing = sandboxes(work)
    assert first.startswith("server/retry.py:1-3\n1\tclass RetryPolicy:\n2\t    def next_delay(self, attempt):\n3\t")
    assert {part.split(":")[0] for part in both.split("\n\n") if part[0] in "sd"} == {
        "server/cache.py",
        "docs/cache.md",
    }
    assert narrow == "docs/cache.md:1-3\n1\t# The cache\n2\t\n3\tEntries are evicted when it is full."
    assert absolute.startswith("server/cache.py:1-3\n") and "\n\n" not in absolute
    assert changed.startswith("new.py:1-1\n1\tdef evict_cache_entry(): pass\n\nserver/cache.py:1-3\n")
    assert nothing == "(nothing found)"


def test_what_is_too_large_is_left_out_or_refused(sandboxes):
    async def work(sandbox):
        await sandbox.shell("yes evict | head -c 300000 > large.txt; head -c 300000 /dev/zero > zeros")
        left_out = await SemanticSearch(max_results=1).call({"query": "delete"}, sandbox)
        small = await SemanticSearch(max_collected_bytes=1000).call({"query": "evict"}, sandbox)
        return left_out.content, small

    left_out, small = sandboxes(work)
    assert left_out.endswith("(1 large file left out)")
    assert not small.ok and small.content == "error: the repository cannot be searched: File too large"


def test_a_backend_that_was_started_anew_is_given_the_files_again(sandboxes):
    tool = SemanticSearch(max_results=1)

    async def work(sandbox):
        before = await tool.call({"query": "evict"}, sandbox)
        process_of(shared()).kill()
        return before.content, (await tool.call({"query": "evict"}, sandbox)).content

    before, after = sandboxes(work)
    assert before == after and before.startswith(("server/cache.py", "docs/cache.md"))


def test_web_search(sandboxes, corpus):
    tool = WebSearch(corpus=corpus)

    async def work(sandbox):
        found = await tool.call({"query": "how long should a client wait"}, sandbox)
        nothing = await tool.call({"query": "qwertyuiop"}, sandbox)
        return found.content, nothing.content

    found, nothing = sandboxes(work)
    assert found == "How to retry\nhttps://docs.example.com/retry\nHow to retry\nWait twice as long each time."
    assert nothing == "(nothing found)"


def test_without_a_corpus_the_web_is_pythons_documentation(sandboxes):
    async def work(sandbox):
        return await WebSearch().call({"query": "where to insert an item in a sorted list"}, sandbox)

    found = sandboxes(work)
    assert found.ok and found.content.startswith("bisect: Bisection algorithms.\nhttps://docs.python.org/3/library/")


def test_a_backend_of_the_user_s_own(sandboxes, service, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", service.token)
    tool = WebSearch(backend=f"{service.url}/", token_env="MY_TOKEN")

    async def work(sandbox):
        return await tool.call({"query": "wait"}, sandbox)

    assert "https://docs.example.com/retry" in sandboxes(work).content
    monkeypatch.setenv("MY_TOKEN", "wrong")
    with pytest.raises(ToolError, match="refuses the token: give its token in the variable MY_TOKEN"):
        sandboxes(work)


@contextlib.contextmanager
def answering(data: bytes, times: list[float]):
    """An HTTP server that answers every request by the same bytes; b"" never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                times.append(time.monotonic())
                held.append(connection)
                with contextlib.suppress(OSError):
                    if data:
                        connection.recv(2**16)
                        connection.sendall(data)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for connection in held:
            connection.close()


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("data", "attempts", "error", "said"),
    [
        (http("503 Busy", b"{}"), 3, ToolError, "failed 3 times .*status 503"),
        (b"", 3, ToolError, "failed 3 times .*no answer within 0.3 s"),
        (b"garbage\r\n\r\n", 3, ToolError, "failed 3 times"),
        (http("200 OK", b"{"), 1, ToolError, "answers what is no JSON object"),
        (http("200 OK", b"[]"), 1, ToolError, "answers what is no JSON object"),
        (http("400 Bad", b'{"error": "no"}'), 1, ToolError, "refuses the request"),
        (http("302 Found", b""), 1, ToolError, "refuses the request"),
        (http("404 Not Found", b"no page"), 1, ToolError, "refuses the request"),
        (http("404 Not Found", b'{"error": "workspace=1"}'), 1, UnknownWorkspaceError, "404"),
        (http("413 Large", b"{}"), 1, TooLargeError, "413"),
        (http("200 OK", b" " * (8 * 2**20 + 1)), 1, ToolError, "answers more than 8388608 bytes"),
    ],
)
def test_an_outage_is_never_shown_to_the_model(data, attempts, error, said):
    times: list[float] = []
    with answering(data, times) as url:
        client = ShadowClient(url, timeout_s=0.3 if not data else 10)
        with pytest.raises(error, match=said):
            asyncio.run(client.post("/web", {"query": "x"}))
    assert len(times) == attempts
    if attempts == 3:
        assert times[1] - times[0] > 0.24 and times[2] - times[1] > 0.49, "a pause before each further attempt"


def test_results_that_are_none_are_an_outage(sandboxes):
    with answering(http("200 OK", b'{"results": [{"url": 1}]}'), []) as url:

        async def work(sandbox):
            await WebSearch(backend=url).call({"query": "x"}, sandbox)

        with pytest.raises(ToolError, match="answers no results with title, url, text"):
            sandboxes(work)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ToolError, match="failed 3 times .*: see whether it runs"):
        asyncio.run(ShadowClient(url).post("/web", {"query": "x"}))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WebSearch(corpus="/nowhere"), "`corpus` must be a folder of pages, but is '/nowhere'"),
        (lambda: WebSearch(backend="http://x", corpus="/"), "`corpus` must be empty where there is a `backend`"),
        (lambda: SemanticSearch(backend="localhost:1"), "`backend` must begin with http"),
        (lambda: SemanticSearch(timeout_s=0), "`timeout_s` must be above 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
