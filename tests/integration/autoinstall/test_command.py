"""`composer autoinstall` as a process: many repositories, trouble, a kill in the middle, and the tasks afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.integration.autoinstall.repositories import BANKGATE, SHOP, SHOP_COMMANDS, command, write_files
from tests.integration.autoinstall.scripted_endpoint import ScriptedEndpoint, Trouble

DECLARED = {
    "mocks": {"bankgate.py": "the bank's client"},
    "generated": ["settings.ini"],
    "variables": {"SHOP_CURRENCY": "EUR"},
}
PROPOSER = [[("propose", {"commands": SHOP_COMMANDS})]]
INSTALLER = [
    [("shell", {"command": "python3 make_settings.py 25"})],
    [("write_file", {"path": "bankgate.py", "content": BANKGATE})],
    [("submit", DECLARED)],
]


class AllAlike(ScriptedEndpoint):
    """Plays its script anew for each repository: a conversation that begins starts it again."""

    def answer(self, agent, request):
        if len(request["messages"]) == 2:
            self.requests[agent].clear()
        return super().answer(agent, request)


def arguments(endpoint: ScriptedEndpoint, output: Path, *repositories: Path, **more: object) -> list[str]:
    settings: dict[str, object] = {
        "repositories": f"[{','.join(map(str, repositories))}]",
        "output": output,
        "proposer.url": endpoint.url("proposer"),
        "installer.url": endpoint.url("installer"),
        "outage_timeout_s": 2,
        "num_commands": 3,
        "limits.memory_bytes": 2**30,
        "limits.disk_bytes": 2**29,
        **more,
    }
    return ["autoinstall", *(f"autoinstall.{key}={value}" for key, value in settings.items())]


def start(words: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "composer", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(words: list[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    process = start(words, folder, **variables)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.slow
def test_from_bare_repositories_to_tasks_that_are_fit(tmp_path):
    shop = write_files(tmp_path / "shop", SHOP)
    bare = write_files(tmp_path / "bare", {"a.txt": "nothing to run"})
    output = tmp_path / "environments"
    endpoint = AllAlike({"proposer": PROPOSER, "installer": INSTALLER})
    with endpoint.serving():
        more = {"proposer.max_turns": 3, "num_commands": 10}
        words = arguments(endpoint, output, shop, bare, tmp_path / "nowhere", **more)
        code, out, err = run(words, tmp_path)
        assert code == 1, err  # one has to be tried again
        lines = out.splitlines()
        assert lines[0] == f"{shop}: installed, in 1 try, its script leads there again"
        # Every command was good enough to be proposed; none could be made to work.
        assert lines[1].startswith(f"{bare}: dropped, no environment in ")
        assert lines[2].startswith(f"{tmp_path}/nowhere: unreadable, ")
        assert lines[3] == f"1 installed, 1 dropped, 1 unreadable: {output}"
        assert "installer, turn 2: write_file (220 tokens)" in err
        code, out, _ = run(arguments(endpoint, output, shop, bare), tmp_path)
        assert code == 0
        assert [line.partition(": ")[2].partition(",")[0] for line in out.splitlines()[:2]] == [
            "installed (before)",
            "dropped (before)",
        ]
    overrides = ["env=installed", f"env.taskset.args.path={output}/installed", "evaluation.num_tasks=9"]
    code, out, err = run(["tasks", "check", *overrides, "env.taskset.args.evaluation_share=0.5"], tmp_path)
    assert code == 0, out + err
    report = json.loads((tmp_path / "runs" / "tasks-installed.json").read_text())
    features = {task["id"].partition("/shop/")[2] for task in report["tasks"]}
    assert features == {f"orders.py::{n}" for n in ("cheapest", "pay", "receipt", "total")} | {
        f"settings.py::{n}" for n in ("currency", "fee")
    }
    assert all(task["verdict"] == "ok" for task in report["tasks"])
    planned = ["plan", "experiment=agent", *overrides[:2], "env.taskset.args.evaluation_share=0.5"]
    code, out, err = run(planned, tmp_path)
    assert code == 0 and "tiny_moe-text-installed" in out, err


@pytest.mark.slow
def test_a_killed_command_leaves_nothing_half_done_and_the_next_goes_on(tmp_path):
    first, second = (write_files(tmp_path / name, SHOP) for name in ("first", "second"))
    output = tmp_path / "environments"
    slow = [*INSTALLER[:2], [("shell", {"command": "sleep 60"})], INSTALLER[2]]
    endpoint = AllAlike({"proposer": PROPOSER, "installer": INSTALLER})
    with endpoint.serving():
        process = start(arguments(endpoint, output, first, second), tmp_path)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"{first}: installed")
        endpoint.scripts["installer"] = slow
        deadline = time.monotonic() + 60
        while len(endpoint.requests["installer"]) != 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # in the middle of `sleep 60`
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert sorted(p.name[:6] for p in (output / "installed").iterdir()) == ["first-"]
        assert not list((output / "dropped").iterdir())
        deadline = time.monotonic() + 20
        while sleepers := [pid for pid in Path("/proc").glob("[0-9]*") if is_sleeping(pid)]:
            assert time.monotonic() < deadline, sleepers
            time.sleep(0.2)
        endpoint.scripts["installer"] = INSTALLER
        code, out, err = run(arguments(endpoint, output, first, second), tmp_path)
    assert code == 0, err
    assert out.splitlines()[0].startswith(f"{first}: installed (before)")
    assert out.splitlines()[1].startswith(f"{second}: installed, in 1 try")
    assert not list(output.glob(".partial*"))


def is_sleeping(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes() == b"sleep\x0060\0"
    except OSError:
        return False


@pytest.mark.parametrize("agent", ["proposer", "installer"])
def test_an_outage_is_no_verdict_and_is_done_again(tmp_path, agent):
    shop = write_files(tmp_path / "shop", SHOP)
    output = tmp_path / "environments"
    scripts = {"proposer": PROPOSER, "installer": INSTALLER}
    endpoint = AllAlike({**scripts, agent: [Trouble(503, '{"error": {"message": "overloaded"}}')]})
    with endpoint.serving():
        code, out, err = run(arguments(endpoint, output, shop), tmp_path)
        assert code == 1
        assert out.startswith(f"{shop}: outage, autoinstall.{agent}.url='{endpoint.url(agent)}': it answered 503")
        assert "asking again in" in err
        assert not list((output / "dropped").iterdir()) and not list((output / "installed").iterdir())
        endpoint.scripts = scripts
        code, out, _ = run(arguments(endpoint, output, shop), tmp_path)
    assert code == 0 and out.startswith(f"{shop}: installed, ")


def test_ctrl_c_ends_it_cleanly(tmp_path):
    shop = write_files(tmp_path / "shop", SHOP)
    endpoint = AllAlike({"proposer": [Trouble(200, "", wait_s=20)], "installer": INSTALLER})
    with endpoint.serving():
        process = start(arguments(endpoint, tmp_path / "out", shop), tmp_path)
        deadline = time.monotonic() + 60
        while not endpoint.requests["proposer"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err


def test_no_key_is_in_anything_that_is_written(tmp_path):
    shop = write_files(tmp_path / "shop", SHOP)
    endpoint = AllAlike({"proposer": PROPOSER, "installer": INSTALLER})
    keys = {"proposer.api_key_env": "THE_KEY", "installer.api_key_env": "THE_KEY"}
    with endpoint.serving():
        words = arguments(endpoint, tmp_path / "out", shop, **keys)
        code, out, err = run(words, tmp_path)
        assert code == 2 and "autoinstall.proposer.api_key_env='THE_KEY'" in err
        code, out, err = run(words, tmp_path, THE_KEY="sk-0123456789")
    assert code == 0, err
    assert set(endpoint.authorizations) == {"Bearer sk-0123456789"}
    assert "sk-0123456789" not in out + err
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"sk-0123456789" not in path.read_bytes()


def test_wrong_input_is_one_plain_sentence(tmp_path):
    endpoint = AllAlike({})
    for words, said in (
        (["autoinstall"], "composer: autoinstall.repositories=[]: name a folder, a *.bundle or a git URL"),
        (["autoinstall", "env=micro", "autoinstall.repositories=[x]"],
         "composer: autoinstall.proposer.tools='glob': is none of env.tools (read_file, search_replace, list_dir, "
         "grep, shell, finish)"),
        (["autoinstall", "-m"], "looks at one config at a time"),
        (["autoinstall", "autoinstall.tries=0"], "autoinstall.tries=0"),
        (["autoinstall", "autoinstall.repositories=[x]", "autoinstall.installer.url=localhost:8000"],
         "composer: autoinstall.installer.url='localhost:8000': is no address: write `http://host:port/v1`"),
        (["autoinstall", "env=coding", "autoinstall.proposer.modle=x"], "autoinstall.proposer.model"),
    ):  # fmt: skip
        code, _, err = run(words, tmp_path)
        assert code == 2 and said in err, err
    endpoint._server.server_close()


def test_a_record_reads_as_it_was_written(tmp_path):
    """What was proposed for one repository is the same command in the record."""
    shop = write_files(tmp_path / "shop", SHOP)
    odd = command('python3 -m shop 100 200  # it\'s: "odd"', "to pay: 325", why="ü: - {x}")
    endpoint = AllAlike({"proposer": [[("propose", {"commands": [odd]})]], "installer": INSTALLER})
    with endpoint.serving():
        code, _, err = run(arguments(endpoint, tmp_path / "out", shop, num_commands=1), tmp_path)
    assert code == 0, err
    [path] = (tmp_path / "out" / "installed").glob("*/environment.yaml")
    [kept] = yaml.safe_load(path.read_text())["commands"]
    assert {k: kept[k] for k in ("command", "lines", "why")} == odd
