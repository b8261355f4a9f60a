"""What the proxy makes of names and failures; in the environment that mitmproxy has."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from envs.egress import client

REPO = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.skipif(not client.is_installed(), reason="egress-not-installed: EGRESS=1 make setup")

PROGRAM = """
import asyncio, json, socket, sys
sys.path.append(sys.argv[1])
from envs.egress import addon, policy, resolver

class Stub(resolver.Resolver):
    async def resolve(self, host, port, may_be_private, **settings):
        raise socket.gaierror(getattr(socket, sys.argv[2]), "x")

async def ask(host, rule, is_known):
    entry = addon.Request("s", host, True, "", 443, "/", True)
    assert await addon._may_connect(entry, policy.Rule(rule), is_known)
    return entry.is_nobody

async def main():
    return [await ask("made-up.sub.test", "*.sub.test", False), await ask("a.sub.test", "*.sub.test", True),
            await ask("open.test", "open.test", False)]

rules = policy.read_policy({"rules": [{"host": "*.sub.test"}]})
with asyncio.Runner(loop_factory=lambda: Stub(rules)) as runner:
    print(json.dumps(runner.run(main())))
"""


@pytest.mark.parametrize(
    ("error", "is_nobody"),
    [("EAI_NONAME", [True, False, False]), ("EAI_NODATA", [True, False, False]), ("EAI_AGAIN", [False, False, False])],
)
def test_a_made_up_name_that_a_pattern_allows_is_no_outage(error: str, is_nobody: list[bool]) -> None:
    python = client.venv() / "bin/python"
    done = subprocess.run([python, "-I", "-c", PROGRAM, REPO, error], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == is_nobody
