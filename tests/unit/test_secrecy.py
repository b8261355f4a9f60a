"""Secrets are named in a config and never stored: what holds one is refused, and nothing shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from composer import config as config_files
from composer.cli import main
from composer.compose import apply, compose
from composer.errors import ConfigError
from composer.plan import make_plan
from composer.redaction import hide, hide_address, hide_named, named_secret, names_secret, secret_in, secret_in_words
from composer.secrecy import refuse_secrets

ROOT = Path(__file__).parents[2]
KEY = "sk-proj-hunter2hunter2hunter2"
MCP = "env.tools.issue={_target_: envs.tools.mcp.McpTool, args: {tool: a, description: b, parameters: {}, %s}}"
HELD = [
    ("env.agent.environment.OPENAI_API_KEY=hunter2", "env.agent.environment.OPENAI_API_KEY", "belongs there"),
    ("env.agent.environment.WHATEVER='http://me:hunter2@host'", "env.agent.environment.WHATEVER", "belongs there"),
    ("env.agent.environment.PASSWORD=hunter2", "env.agent.environment.PASSWORD", "belongs there"),
    (f"env.agent.environment.A={KEY}", "env.agent.environment.A", "belongs there"),
    ("env.agent.command=[agent,--api-key,hunter2]", "env.agent.command[2]", "belongs there"),
    ("env.agent.command=[agent,'--auth-token=hunter2']", "env.agent.command[1]", "belongs there"),
    ("env.agent.command=[sh,-c,'GITHUB_TOKEN=hunter2 agent']", "env.agent.command[2]", "belongs there"),
    (f"env.agent.files.a={{path: /tmp/a, text: 'key = \"{KEY}\"'}}", "env.agent.files.a.text", "belongs there"),
    (f"env.system_prompt='Use {KEY}.'", "env.system_prompt", "environment variable"),
    ("autoinstall.installer.url='https://user:hunter2@host/v1'", "autoinstall.installer.url", "api_key_env"),
    ("autoinstall.proposer.url='https://host/v1?api_key=hunter2'", "autoinstall.proposer.url", "api_key_env"),
    ("autoinstall.repositories=['https://hunter2@github.com/a/b']", "autoinstall.repositories[0]", "clone it yourself"),
    ("autoinstall.repositories=['https://me:hunter2@host/b']", "autoinstall.repositories[0]", "clone it yourself"),
    (MCP % "command: [a], env: {GITHUB_TOKEN: hunter2}", "env.tools.issue.args.env.GITHUB_TOKEN", "belongs there"),
    (MCP % "command: [a, --token, hunter2]", "env.tools.issue.args.command[2]", "belongs there"),
    (
        "env.sandbox.args.egress={rules: [{host: a.com, authorization: 'Bearer hunter2'}]}",
        "env.sandbox.args.egress.rules[0].authorization",
        "header_env",
    ),
    ("env.monitor.judge.url='http://me:hunter2@host/v1'", "env.monitor.judge.url", "api_key_env"),
    ("env.monitor.judge.url='http://host/v1?key=hunter2'", "env.monitor.judge.url", "api_key_env"),
    ("autoinstall.proposer.api_key_env=hunter2-with-4-words", "autoinstall.proposer.api_key_env", "no name of an"),
    (
        "env.sandbox.args.egress={rules: [{host: a.com, header: Authorization, header_env: 'Bearer hunter2'}]}",
        "env.sandbox.args.egress.rules[0].header_env",
        "no name of an environment variable",
    ),
    ("tracking.uri='postgresql://me:hunter2/x@host/db'", "tracking.uri", "PGPASSWORD"),
    ("tracking.uri='https://hunter2@host'", "tracking.uri", "MLFLOW_TRACKING_TOKEN"),
    ("launcher.args.redis_password=hunter2", "launcher.args.redis_password", "`redis_password_env`"),
    ("env.taskset.args.secret=hunter2", "env.taskset.args.secret", "`secret_env`"),
    ("+hydra.job.env_set.API_KEY=hunter2", "hydra.job.env_set.API_KEY", "export it"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("override", "key", "remedy"), HELD, ids=[f"{key}-{i}" for i, (_, key, _) in enumerate(HELD)])
def test_a_config_that_holds_a_secret_is_refused(
    override: str, key: str, remedy: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is begun, and the secret is in no word of what is said."""
    assert main([override]) == 2
    said = capsys.readouterr()
    [error] = said.err.strip().splitlines()
    assert error.startswith(f"composer: {key}='(hidden)': ") and "not stored" in error and remedy in error
    assert "hunter2" not in said.err + said.out and list(here.iterdir()) == []


@pytest.mark.parametrize("words", [["plan"], ["--cfg", "job"], ["doctor"], ["-m", "seed=1,2"], ["autoinstall"]])
def test_no_command_shows_one(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "autoinstall.installer.url='https://user:hunter2@host/v1'"]) == 2
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err and "autoinstall.installer.url='(hidden)'" in said.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    [
        "env.agent.enviroment.OPENAI_API_KEY=hunter2",
        "env.agent.enviroment={OPENAI_API_KEY: hunter2}",
        "+env.agent.environment.OPENAI_API_KEY={a: hunter2}",
        "env.agent.environment.OPENAI_API_KEY=[hunter2",
        "env.agent.environment.OPENAI_API_KEY=hunter2,hunter2",
        "algorithm.password=hunter2",
        "env.max_turns='http://me:hunter2@host'",
        f"seed={KEY}",
        "env.agent.environment.PASSWORD=2222222",
    ],
)
def test_what_else_is_wrong_is_said_without_it(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A key that is misspelt, a value of another type: the sentence about it holds no secret either."""
    assert main(["plan", override]) == 2
    said = capsys.readouterr()
    assert "hunter2" not in said.err + said.out and "2222222" not in said.err + said.out, said.err
    assert len(said.err.strip().splitlines()) == 1


def test_a_variable_is_not_resolved_into_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its own name says what it holds, or the key's."""
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setenv("MINE", "hunter2")
    for override in ("tracking.run_name=${oc.env:MY_TOKEN}", "env.agent.environment.API_KEY=${oc.env:MINE}"):
        with pytest.raises(ConfigError, match="not stored") as caught:
            compose([override])
        assert "hunter2" not in str(caught.value)


def test_a_stored_config_is_held_against_it_too(here: Path) -> None:
    """That of a run which goes on, and which somebody has written into."""
    config = compose()
    with pytest.raises(ConfigError, match="env.agent.environment.API_KEY='\\(hidden\\)'"):
        make_plan(apply(config, ["env.agent.command=[a]", "env.agent.environment.API_KEY=hunter2"]))
    run = here / "run"
    run.mkdir()
    data = config_files.to_dict(config)
    data["tracking"]["run_name"] = KEY
    (run / config_files.CONFIG_FILE).write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match="tracking.run_name='\\(hidden\\)'") as caught:
        make_plan(config_files.load(run))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("group", ["env", "experiment"])
def test_what_is_shipped_holds_none(group: str) -> None:
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        compose([f"+{group}={path.stem}" if group == "experiment" else f"{group}={path.stem}"])


@pytest.mark.parametrize(
    "data",
    [
        {"env": {"agent": {"environment": {"OPENAI_API_KEY": "{api_key}", "TOKEN": "", "API_KEY": "EMPTY"}}}},
        {"env": {"agent": {"command": ["agent", "--api-key", "{api_key}", "--token-budget", "9", "max_tokens=9"]}}},
        {
            "env": {
                "agent": {"files": {"a": {"text": 'key = os.environ["OPENAI_API_KEY"]\nurl = f"http://{me}:{pw}@h"'}}}
            }
        },
        {"env": {"monitor": {"effects": {"credentials": "zero"}, "honeypots": {"places": {"credentials": "~/x"}}}}},
        {"env": {"tools": {"a": {"args": {"parameters": {"properties": {"password": {"type": "string"}}}}}}}},
        {"autoinstall": {"repositories": ["ssh://git@host/a.git", "https://host:80/a@b?ref=main", "git@host:a/b.git"]}},
        {"a": {"api_key_env": "MY_KEY", "max_tokens": 5, "eos_token": "<|im_end|>", "pad_token": 3, "secret": None}},
        {"a": {"credentials": "/home/me/key.json", "sorted": "task-descriptions-of-2024-and-more"}},
        {"tracking": {"uri": "postgresql://user@host:5432/db?sslmode=verify-full&sslkey=/a/client.pem"}},
        {"sandbox": {"rules": [{"host": "pypi.org", "header": "Authorization", "header_env": "MIRROR_KEY"}]}},
    ],
)
def test_names_and_placeholders_are_no_secrets(data: dict) -> None:
    refuse_secrets(data)


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        "sk-ant-api03-" + "a1" * 20,
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1" * 20,
        "glpat-" + "a1" * 10,
        "hf_" + "aB" * 17,
        "xoxb-123456789012-abcdef",
        "AKIA" + "A1" * 8,
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
        "Authorization: Bearer abcdef0123456789",
    ],
)
def test_tokens_are_known_by_their_form(text: str) -> None:
    assert secret_in(f"a {text} b") == secret_in(text) == "holds what looks like a token"
    assert text.rpartition(" ")[2] not in hide(f"a {text}\nb")


def test_names() -> None:
    secret = "API_KEY openai-api-key x-api-key PGPASSWORD dbPassword GITHUB_TOKEN client_secret AWS_ACCESS_KEY_ID"
    assert all(map(names_secret, secret.split()))
    plain = "api_key_env max_tokens tokenizer key keys secretary num_tokens password_file monkey sort_key tokens"
    assert not any(map(names_secret, plain.split()))
    assert named_secret("token", 5) is None and named_secret("password", 5) and named_secret("password", True) is None
    assert secret_in_words(["a", 5, "--password", "y"]) == (3, "follows --password")


def test_hiding() -> None:
    assert hide_named("{'API_KEY': 'abc', 'x': 'y'} TOKEN=abc b=c") == "{'API_KEY': '***', 'x': 'y'} TOKEN=*** b=c"
    assert hide_address("https://me:a/b@host/x?token=y") == "https://***@host/x?***"
    error = ConfigError("a.API_KEY", "hunter2", "write `b=hunter2`")
    assert str(error) == "a.API_KEY='(hidden)': write `b=(hidden)`" and error.value == "hunter2"
    assert str(ConfigError("a", "b", "c")) == "a='b': c"


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "a." * 100_000, "http://a:" * 20_000, "-----BEGIN PRIVATE KEY-----" * 999]
)
def test_long_texts_take_no_time(text: str) -> None:
    import time

    began = time.process_time()
    secret_in(text)
    str(ConfigError("a", text, text))
    assert time.process_time() - began < 5
