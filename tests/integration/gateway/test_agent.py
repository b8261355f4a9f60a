"""Agent programs in real sandboxes: how they reach the gateway, how they end, and whose fault it is if they do not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer.contract import Grade, SandboxLimits
from composer.errors import MachineError, SandboxStartError
from composer.gateway.agent import AgentProgram, ExternalHarness
from composer.gateway.channel import Channel
from composer.rollout.chat import Chat
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.rollout.preflight import check_agent
from composer.types import PREVIOUS, Outcome, Split, Trajectory
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tasks.micro import MicroTaskset
from tests.unit.gateway.policy import Line, Policy

TASK = MicroTaskset().task(Split.TRAIN, 0)
ASK = """
import json, os, sys, urllib.request

def ask(messages, key=os.environ.get("KEY"), **more):
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    url, headers = os.environ["URL"] + "/v1/chat/completions", {"Authorization": "Bearer " + key}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["choices"][0]["message"]

user = {"role": "user", "content": sys.argv[1]}
"""
ENVIRONMENT = {"URL": "{base_url}", "KEY": "{api_key}"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'


class Left:
    """1.0 if the agent left `done` behind."""

    name = "left"

    async def grade(self, task, files, backend, trajectory) -> Grade:
        return Grade(float(files.get("done") == b"yes"), {"files": sorted(files)})


@pytest.fixture(scope="module")
def backend(runner: asyncio.Runner) -> Iterator[BubblewrapBackend]:
    backend = BubblewrapBackend("test", profile="plain", folders=[f"{sysconfig.get_path('purelib')}:/opt/agent"])
    yield backend
    runner.run(backend.close())


def play(
    runner: asyncio.Runner,
    backend: BubblewrapBackend,
    chat: Chat,
    policy: Policy,
    script: str,
    command: list[str] | None = None,
    files: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    **settings,
) -> Trajectory:
    """One episode of an agent; by default of a script that has `ask`."""
    program = AgentProgram(
        command or ["python3", "/tmp/agent/agent.py", "{request}"],
        environment or ENVIRONMENT,
        files or {"/tmp/agent/agent.py": ASK + script},
    )
    given = {"max_turns": 5, "max_turn_tokens": 400, "max_model_len": 8000, "episode_timeout_s": 60.0, **settings}

    async def main() -> Trajectory:
        harness = ExternalHarness(program, chat, EnvSettings(**given))
        env = Env(
            EnvSettings(**given),
            chat=chat,
            taskset=MicroTaskset(),
            tools=[],
            rubric=Rubric({"left": Left()}),
            backend=backend,
            harness=harness,
        )
        try:
            return await env.run_episode(TASK, "g", "g/0", policy)
        finally:
            await harness.close()

    t = runner.run(main())
    assert not getattr(backend, "_sandboxes", {}), "every sandbox is stopped"
    assert (t.reward is None) == (t.outcome is Outcome.INFRASTRUCTURE_ERROR) == bool(t.error)
    assert Trajectory.from_dict(json.loads(json.dumps(t.to_dict()))) == t
    return t


def exact(policy: Policy, t: Trajectory) -> bool:
    """One path, which ends in what the policy was last sent and has said."""
    [path] = t.paths
    return path.token_ids == [*policy.sent[-1], *policy.said[-1]] and all(x.parent == PREVIOUS for x in t.turns)


def test_an_agent_works_and_what_it_leaves_is_graded(runner, backend, chat) -> None:
    policy = Policy(chat, ["I will.", "Done."])
    script = """
first = ask([user])
open("done", "w").write("yes")
last = ask([user, first, {"role": "user", "content": "Is it done?"}])
print("the agent says", last["content"])
sys.exit(7)
"""
    t = play(runner, backend, chat, policy, script)
    assert (t.outcome, t.reward, t.error) == (Outcome.FINISHED, 1.0, "")
    assert "done" in t.metadata["left"]["files"] and "main.py" in t.metadata["left"]["files"]
    assert not any("agent" in f for f in t.metadata["left"]["files"]), "its own files lie outside"
    assert t.metadata["agent"] == {"exit_code": 7, "output": "the agent says Done."}
    assert [m.content for m in t.messages] == [TASK.request, "I will.", "Is it done?", "Done."]
    assert exact(policy, t)


@pytest.mark.skipif(
    importlib.util.find_spec("minisweagent") is None, reason="mini-swe-agent is not installed (extra `test`)"
)
def test_mini_swe_agent(runner, backend, chat) -> None:
    """A tool call, a turn without one, which it drops and asks again, and its own end."""
    policy = Policy(
        chat,
        [
            CALL % "printf yes > done; cat main.py",
            "I forgot to call.",
            CALL % "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        ],
    )
    command = [
        *("python3", "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately", "--config", "mini.yaml"),
        *("--model", "openai/{model}", "--output", "/tmp/agent/t.json", "--task", "{request}"),
    ]
    environment = {
        "PYTHONPATH": "/opt/agent",
        "OPENAI_BASE_URL": "{base_url}/v1",
        "OPENAI_API_KEY": "{api_key}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/agent",
    }
    t = play(runner, backend, chat, policy, "", command, {"/tmp/agent/x": ""}, environment)
    assert (t.outcome, t.reward) == (Outcome.FINISHED, 1.0), (t.error, t.metadata)
    # The turn without a call is not in what it sends next: a path of its own, and trained on all the same.
    assert [x.parent for x in t.turns] == [PREVIOUS, PREVIOUS, 0]
    dropped, main = t.paths
    assert dropped.token_ids == [*policy.sent[1], *policy.said[1]]
    assert main.token_ids == [*policy.sent[2], *policy.said[2]]
    assert sum(dropped.loss_mask) + sum(main.loss_mask) == sum(map(len, policy.said))
    assert "def " in t.turns[0].observation and t.turns[2].tool_calls[0].name == "bash"


def test_threads_of_an_agent_ask_at_the_same_time(runner, backend, chat) -> None:
    policy = Policy(chat, say=lambda text: f"heard {text[-60:-35]!r}")
    script = """
import threading
first = ask([user])
more = [threading.Thread(target=ask, args=[[user, first, {"role": "user", "content": f"part {i}"}]]) for i in range(4)]
[t.start() for t in more], [t.join() for t in more]
"""
    t = play(runner, backend, chat, policy, script)
    assert t.outcome is Outcome.FINISHED and len(t.paths) == 4 and t.metadata["gateway"]["branches"] == 3
    assert sorted(t.parents, key=str) == [0, 0, 0, 0, None]
    assert {tuple(p.token_ids) for p in t.paths} == {
        (*sent, *said) for sent, said in zip(policy.sent[1:], policy.said[1:], strict=True)
    }


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["no-such-agent"],
            "ended with exit code 127 before it had asked the model anything; it said 'no-such-agent: No",
        ),
        (
            ["python3", "-c", "raise SystemExit('no config')"],
            "ended with exit code 1 before it had asked the model anything",
        ),
    ],
)
def test_an_agent_that_never_asks_has_no_reward(runner, backend, chat, command, said) -> None:
    t = play(runner, backend, chat, Policy(chat), "", command)
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and said in t.error and t.error.endswith("mend env.agent")


def test_an_outage_has_no_reward_and_ends_the_agent(runner, backend, chat) -> None:
    """An agent that would go on for ever without the model is ended."""
    script = """
first = ask([user])
try:
    ask([user, first, user])
except Exception as error:
    open("done", "w").write("yes")
import time; time.sleep(1000)
"""
    began = time.monotonic()
    t = play(runner, backend, chat, Policy(chat, ["one", Policy.down()]), script)
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and "its process is dead" in t.error
    assert len(t.turns) == 1 and time.monotonic() - began < 20
    assert "dead" not in "".join(m.content for m in t.messages)


def test_an_agent_that_does_not_stop_asking_is_ended_at_max_turns(runner, backend, chat, monkeypatch) -> None:
    monkeypatch.setattr("composer.gateway.agent._GRACE_S", 1.0)
    script = """
while True:
    try:
        ask([user])
    except Exception:
        pass
"""
    policy = Policy(chat, say=lambda _: "again")
    t = play(runner, backend, chat, policy, script, max_turns=3)
    assert (t.outcome, t.reward, len(t.turns)) == (Outcome.MAX_TURNS, 0.0, 3)
    assert t.metadata["gateway"]["refused_max_turns"] >= 1


def test_an_agent_that_ends_at_a_full_context(runner, backend, chat) -> None:
    script = """
first = ask([user])
try:
    ask([user, first, {"role": "user", "content": "word " * 5000}])
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""
    t = play(runner, backend, chat, Policy(chat, ["one"]), script)
    assert (t.outcome, t.reward) == (Outcome.CONTEXT_FULL, 0.0) and len(t.turns) == 1


@pytest.mark.parametrize(
    ("script", "line", "outcome"),
    [
        ("ask([user]); import time; time.sleep(1000)", "one", Outcome.TIMED_OUT),
        ("ask([user])", None, Outcome.INFRASTRUCTURE_ERROR),
    ],
    ids=["the agent's time", "the policy's time"],
)
def test_whose_time_it_was(runner, backend, chat, script, line: Line | None, outcome) -> None:
    policy = Policy(chat, [line] if line else [])
    if line is None:
        policy.gate = asyncio.Event()
        runner.run(asyncio.sleep(0))
    t = play(runner, backend, chat, policy, script, episode_timeout_s=4.0)
    assert t.outcome is outcome, t.error
    assert (t.reward == 0.0) == (outcome is Outcome.TIMED_OUT)


def test_a_key_of_another_episode_is_refused(runner, backend, chat) -> None:
    script = """
ask([user])
try:
    ask([user], key="sk-of-somebody-else")
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    t = play(runner, backend, chat, Policy(chat, ["one", "two"]), script)
    output = t.metadata["agent"]["output"]
    assert len(t.turns) == 1 and output.startswith("401") and "invalid_api_key" in output


def test_an_agent_that_kills_its_relay_has_ended(runner, backend, chat) -> None:
    script = """
ask([user])
os.kill(os.getppid(), 9)
"""
    t = play(runner, backend, chat, Policy(chat, ["one"]), script)
    assert (t.outcome, t.reward) == (Outcome.FINISHED, 0.0) and t.metadata["agent"]["exit_code"] == 137


def test_preflight_finds_what_is_missing(runner, backend) -> None:
    def check(command: list[str], backend: BubblewrapBackend = backend, **environment: str) -> None:
        runner.run(check_agent(command, environment, backend, SandboxLimits(), ""))

    check(["python3"])
    check(["python3"], PATH="/opt/python/bin")
    with pytest.raises(MachineError, match=r"env.agent.command=\['mini', '-y'\]: there is no program 'mini' in the"):
        check(["mini", "-y"])
    with pytest.raises(MachineError, match="the sandbox has no working python3"):
        check(["mini"], PATH="/nowhere")


def test_folders_are_seen_read_only(runner, tmp_path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "word").write_text("hello")

    async def look(folder: str) -> bytes:
        backend = BubblewrapBackend("test", profile="plain", folders=[folder])
        try:
            sandbox = await backend.start({}, SandboxLimits())
            where = folder.partition(":")[2] or folder
            return (await sandbox.shell(f"cat {where}/word; echo x > {where}/word; ls -d {where}/..")).output
        finally:
            await backend.close()

    for folder in (f"{tmp_path}/agent:/opt/agents/one", f"{tmp_path}/agent:/srv/agent"):
        seen = runner.run(look(folder)).decode()
        assert seen.startswith("hello") and "Read-only file system" in seen
    with pytest.raises(SandboxStartError, match="folders='/nowhere/at/all': no such folder on this machine"):
        runner.run(look("/nowhere/at/all"))
    with pytest.raises(SandboxStartError, match="sandboxes would see .*: name a smaller folder"):
        runner.run(look(f"{Path(__file__).parents[3]}:/opt/agent"))
    for wrong in ("relative", f"{tmp_path}:/usr/agent", f"{tmp_path}:/agent", f"{tmp_path}:/opt/../etc"):
        with pytest.raises(ValueError, match="folders="):
            BubblewrapBackend("test", folders=[wrong])


@pytest.mark.parametrize("stops", [True, False], ids=["the agent stops", "the agent would go on"])
def test_an_agent_that_loses_the_gateway_has_no_reward(runner, backend, chat, monkeypatch, stops: bool) -> None:
    """It has done its work, and what it left would be worth 1: nobody knows what the policy would have said."""
    policy, said = Policy(chat, ["one"]), []

    async def open_connection(*args, **kwargs):
        if said and "sock" not in kwargs:
            raise OSError(24, "Too many open files")
        said.append(args)
        return await real(*args, **kwargs)

    real = asyncio.open_connection
    monkeypatch.setattr("composer.gateway.channel.asyncio.open_connection", open_connection)
    monkeypatch.setattr("composer.gateway.agent._GRACE_S", 1.0)
    script = f"""
open("done", "w").write("yes")
try:
    first = ask([user])
    ask([user, first, user])
except OSError as error:
    print(error)
{"" if stops else "import time; time.sleep(1000)"}
"""
    t = play(runner, backend, chat, policy, script)
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and t.reward is None
    assert "connection to the gateway broke (OSError: [Errno 24] Too many open files)" in t.error


def test_an_agent_that_loses_the_channel_of_its_sandbox_has_no_reward(runner, backend, chat, monkeypatch) -> None:
    """As when the engine of its container drops the connection: the relay ends it, and it has not stopped by itself."""
    passed_on, number = Channel._pass_on, 0

    async def breaks(self: Channel, *args) -> None:
        nonlocal number
        number += 1
        await passed_on(self, *args)
        if number > 1 and self._writer is not None:
            self._writer.transport.abort()

    monkeypatch.setattr(Channel, "_pass_on", breaks)
    script = """
open("done", "w").write("yes")
for _ in range(5):
    ask([user])
"""
    t = play(runner, backend, chat, Policy(chat, say=lambda _: "again"), script)
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and "the channel to the agent's sandbox broke" in t.error
