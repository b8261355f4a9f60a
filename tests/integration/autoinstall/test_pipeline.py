"""From a bare repository to an environment, with real sandboxes and a scripted endpoint in place of the models."""

from __future__ import annotations

import json
import subprocess

import pytest

from composer.autoinstall.pipeline import Ended
from tests.integration.autoinstall.conftest import sandboxes
from tests.integration.autoinstall.repositories import (
    BANKGATE,
    CALC,
    CALC_COMMANDS,
    PYTEST,
    SHOP,
    SHOP_COMMANDS,
    command,
    write_files,
)
from tests.integration.autoinstall.scripted_endpoint import Trouble

DECLARED = {
    "mocks": {"bankgate.py": "the bank's client; takes every card that does not end in `bad`"},
    "generated": ["settings.ini"],
    "variables": {"SHOP_CURRENCY": "EUR"},
}
THREE = SHOP_COMMANDS[:3]
"""All of the tests, those of settings.py, those of orders.py."""
SETTINGS = ("shell", {"command": "python3 make_settings.py 25"})
MOCK = ("write_file", {"path": "bankgate.py", "content": BANKGATE})


@pytest.fixture
def shop(tmp_path):
    return write_files(tmp_path / "shop", SHOP)


def scripts(*installer, commands=THREE):
    return {"proposer": [[("propose", {"commands": commands})]], "installer": list(installer)}


def test_a_python_repository_that_needs_a_variable_a_generated_file_and_a_mock(pipeline, shop, backend):
    script = {
        "proposer": [
            [("list_dir", {"path": "."}), ("read_file", {"path": "README.md"})],
            [("propose", {"commands": SHOP_COMMANDS})],
        ],
        "installer": [
            [SETTINGS],
            [("submit", {"generated": ["settings.ini"]})],
            [MOCK],
            [("submit", DECLARED)],
        ],
    }
    result = pipeline.run(shop, script, num_commands=10)
    assert (result.ended, result.reason) == (Ended.INSTALLED, "in 2 tries, its script leads there again")
    record = pipeline.record(result)
    assert record["models"] == "scripted stand-in"
    assert len(record["commands"]) == 10
    chosen = [c for c in record["commands"] if c["chosen"]]
    assert len(chosen) == 3 and all(c["verified"] == c["chosen"] for c in record["commands"])
    assert [t["ok"] for t in record["tries"]] == [False, True]
    assert record["replay"] == "same verdict"
    assert record["mocks"] == DECLARED["mocks"] and record["variables"] == {"SHOP_CURRENCY": "EUR"}
    # The proposer saw the repository, the installer only what was chosen, and what differed.
    looked, read = pipeline.endpoint.told("proposer")
    assert "settings.template" in looked and "Needs SHOP_CURRENCY" in read
    request = pipeline.endpoint.requests["installer"][0]["messages"][1]["content"]
    assert [c["command"] for c in record["commands"] if json.dumps(c["command"]) in request] == [
        c["command"] for c in chosen
    ]
    assert "No module named 'bankgate'" in pipeline.endpoint.told("installer")[1]
    folder = pipeline.environment(result)
    files = {str(p.relative_to(folder / "repository")) for p in (folder / "repository").rglob("*") if p.is_file()}
    assert files == set(SHOP)
    assert sorted(p.name for p in folder.iterdir()) == [
        "environment.yaml", "install.sh", "installer.jsonl", "proposer.jsonl", "repository", "snapshot",
    ]  # fmt: skip
    assert "python3 make_settings.py 25" in (folder / "install.sh").read_text()
    last = json.loads((folder / "installer.jsonl").read_text().splitlines()[-1])
    assert last["content"] == "all commands give what is expected"
    assert not list(pipeline.folder.glob(".partial*")) and sandboxes(backend) == 0

    # What was finished is not done again.
    again = pipeline.run(shop, {"proposer": [], "installer": []}, num_commands=10)
    assert (again.ended, again.again, again.reason) == (Ended.INSTALLED, True, result.reason)
    assert not pipeline.endpoint.requests


def test_a_makefile_and_c(pipeline, tmp_path):
    source = write_files(tmp_path / "calc", CALC)
    build = "sed s/@BASE@/10/ config.h.in > config.h && make -s"
    script = scripts(
        [("shell", {"command": build})],
        [("submit", {"generated": ["calc", "config.h"]})],
        commands=CALC_COMMANDS,
    )
    result = pipeline.run(source, script)
    assert (result.ended, result.reason) == (Ended.INSTALLED, "in 1 try, its script leads there again")


def test_a_hopeless_repository_is_dropped(pipeline, tmp_path, backend):
    files = {
        "main.py": "import gpu_driver\n\nprint('device', gpu_driver.name())\n",
        "test_main.py": "def test_driver():\n    import gpu_driver\n\n    assert gpu_driver.probe(7) == 49\n",
    }
    source = write_files(tmp_path / "hopeless", files)
    commands = [
        command(f"{PYTEST} -q", "1 passed"),
        command(f"{PYTEST} -v", "test_driver PASSED"),
        command("python3 main.py", "device H900"),
    ]
    script = scripts([("shell", {"command": "pip install gpu-driver"})], [("submit", {})], commands=commands)
    result = pipeline.run(source, script)
    assert result.ended is Ended.DROPPED
    assert result.reason.startswith(
        f"no environment in 5 tries: {PYTEST} -q: exit code 1 in place of 0; no line with '1 passed'"
    )
    record = pipeline.record(result)
    assert [t["ok"] for t in record["tries"]] == [False] * 5 and record["outcome"] == "dropped"
    assert not (pipeline.environment(result) / "snapshot").exists()
    assert len(pipeline.endpoint.requests["installer"]) == 6 and sandboxes(backend) == 0
    assert pipeline.run(source, {"proposer": [], "installer": []}).again


FAKE_PYTEST = """#!/bin/sh
echo 'tests/test_settings.py::test_fee PASSED'
echo 'tests/test_settings.py::test_currency PASSED'
"""
PASSING = "\n".join(f"def test_{i}(): pass" for i in range(7))
CHEATS = {
    "a fake program on PATH": (
        [("write_file", {"path": "/home/dev/.local/bin/pytest", "content": "#!/bin/sh\nprintf '%s passed' 7\n"}),
         ("shell", {"command": "chmod +x ~/.local/bin/pytest"})],
        DECLARED,
        "the program 'pytest' would be /home/dev/.local/bin/pytest, which no package manager put there",
    ),
    "a link to another program": (
        [("shell", {"command": "mkdir -p ~/.local/bin; ln -s /usr/bin/true ~/.local/bin/pytest"})],
        DECLARED,
        "the program 'pytest' would be /home/dev/.local/bin/pytest",
    ),
    "edited tests": (
        [SETTINGS, MOCK, ("write_file", {"path": "tests/test_orders.py", "content": PASSING})],
        DECLARED,
        "the repository's own files were changed, and have been put back: tests/test_orders.py",
    ),
    "a module in pytest's place": (
        [SETTINGS, ("write_file", {"path": "pytest.py", "content": "print(3 + 4, 'passed')\n"})],
        {**DECLARED, "mocks": {"pytest.py": "pytest"}},
        "pytest.py would stand in for 'pytest', which a command names",
    ),
    "a plugin that tests load by themselves": (
        [SETTINGS, MOCK, ("write_file", {"path": "conftest.py", "content": "def pytest_collection(): pass\n"})],
        {**DECLARED, "generated": ["settings.ini", "conftest.py"]},
        "these would change what test runners or Python do, and must go: /home/dev/project/conftest.py",
    ),
    "expected output in a mock": (
        [SETTINGS, ("write_file", {"path": "bankgate.py", "content": "print('test_fee PASSED')\n"})],
        DECLARED,
        "these hold expected output word for word, and must not: /home/dev/project/bankgate.py",
    ),
    "what is not declared": (
        [SETTINGS, MOCK],
        {**DECLARED, "generated": []},
        "new files in the repository's folder are declared neither as mocks nor as generated: settings.ini",
    ),
    "a variable that finds other programs": (
        [SETTINGS, MOCK],
        {**DECLARED, "variables": {"PATH": "/tmp:/usr/bin", "PYTEST_ADDOPTS": "-k nothing"}},
        "these variables may not be set: PATH, PYTEST_ADDOPTS",
    ),
    "a program in a folder that cannot be listed": (
        [("write_file", {"path": "/home/dev/.local/bin/pytest", "content": "#!/bin/sh\nprintf '%s passed' 7\n"}),
         ("shell", {"command": "chmod 555 ~/.local/bin/pytest; chmod 111 ~/.local/bin"})],
        DECLARED,
        "the program 'pytest' would be /home/dev/.local/bin/pytest, which no package manager put there",
    ),
    "a part of pytest": (
        [SETTINGS, MOCK, ("write_file", {"path": "/home/dev/lib/_pytest/__init__.py", "content": ""})],
        {**DECLARED, "variables": {"SHOP_CURRENCY": "EUR", "PYTHONPATH": "/home/dev/lib"}},
        "these would stand in for parts of Python or pytest, and must go: /home/dev/lib/_pytest/__init__.py",
    ),
    "a copy of the sources": (
        [SETTINGS, MOCK, ("shell", {"command": "mkdir ~/lib && cp -r shop ~/lib/"})],
        DECLARED,
        "there are copies of the repository's sources, which would not follow its changes: /home/dev/lib/shop/",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_who_cheats_is_refused_and_told(pipeline, shop, cheat):
    steps, declared, told = CHEATS[cheat]
    commands = [command("pytest -p no:cacheprovider -q", "7 passed"), *THREE[1:]]
    script = scripts(*([step] for step in steps), [("submit", declared)], commands=commands)
    result = pipeline.run(shop, script, tries=1)
    assert result.ended is Ended.DROPPED
    [submitted] = pipeline.record(result)["tries"]
    assert any(told in fault for fault in submitted["lacked"]), submitted
    last = json.loads((pipeline.environment(result) / "installer.jsonl").read_text().splitlines()[-1])
    assert told in last["content"] and "0 tries are left" in last["content"]


def test_edited_tests_are_put_back_and_an_honest_try_goes_on(pipeline, shop):
    edit = ("write_file", {"path": "tests/test_orders.py", "content": PASSING})
    result = pipeline.run(shop, scripts([SETTINGS, MOCK, edit], [("submit", DECLARED)], [("submit", DECLARED)]))
    assert (result.ended, result.reason) == (Ended.INSTALLED, "in 2 tries, its script does not: snapshot only")
    assert "own files were changed" in pipeline.record(result)["replay"]
    kept = pipeline.environment(result) / "repository" / "tests" / "test_orders.py"
    assert kept.read_text() == SHOP["tests/test_orders.py"]


def test_output_that_does_not_come_from_the_repository_is_refused(pipeline, shop):
    """The guards find no fault with a service that answers always alike, but garbled files do."""
    answer = "import sys\nsys.stdout.write('%d %s' % (7, 'passed'))\n"
    steps = [SETTINGS, MOCK, ("write_file", {"path": "/home/dev/verify.py", "content": answer})]
    commands = [command("python3 ~/verify.py", "7 passed"), *THREE[1:]]
    script = scripts(*([step] for step in steps), [("submit", DECLARED)], commands=commands)
    result = pipeline.run(shop, script, tries=1)
    assert result.ended is Ended.DROPPED
    assert "its output does not come from them" in result.reason


def test_what_a_script_does_not_do_again_is_a_snapshot_only(pipeline, shop):
    """A step that failed has left something all the same."""
    half = ("shell", {"command": "python3 make_settings.py 25; false"})
    result = pipeline.run(shop, scripts([half, MOCK], [("submit", DECLARED)]))
    assert (result.ended, result.reason) == (Ended.INSTALLED, "in 1 try, its script does not: snapshot only")
    assert pipeline.record(result)["replay"].startswith("snapshot only: ")


def test_time_that_endpoints_lost_is_no_verdict(pipeline, shop):
    script = {"proposer": [Trouble(503, "{}")], "installer": []}
    result = pipeline.run(shop, script, outage_timeout_s=60.0, repository_timeout_s=4.0)
    assert result.ended is Ended.OUTAGE and "of it went to attempts at which the endpoints failed" in result.reason


def test_time_that_the_agents_used_up_is_one(pipeline, shop, backend):
    script = scripts([("shell", {"command": "sleep 30"})])
    result = pipeline.run(shop, script, repository_timeout_s=10.0)
    assert (result.ended, result.reason) == (Ended.DROPPED, "it was not done within 10 s")
    assert sandboxes(backend) == 0


def test_unfit_commands_are_refused_with_a_reason_and_what_is_fit_is_kept(pipeline, shop):
    proposals = [
        command("ls -la", "README.md"),
        command("echo 7 passed", "7 passed"),
        command("python3 -m py_compile shop/orders.py; python3 -c 'print(3 * 5)'", "15"),
        {"command": "make"},
        THREE[0],
        {**THREE[0], "command": f"{PYTEST}  -q"},
    ]
    script = {
        "proposer": [[("propose", {"commands": proposals})], [("propose", {"commands": [*THREE[1:], THREE[0]]})]],
        "installer": [[("submit", {})]],
    }
    result = pipeline.run(shop, script, tries=1)
    assert result.ended is Ended.DROPPED
    answers = [r["reason"] for r in pipeline.record(result)["refused"]]
    assert answers == [
        "it is trivial: it runs neither the repository's program nor a tool on it",
        "it is trivial: it runs neither the repository's program nor a tool on it",
        "it gives its expected output on the bare machine already",
        "'why' is a required property",
        "it was proposed already",
    ]
    assert (
        "1 are accepted and kept; propose 2 more"
        in pipeline.endpoint.requests["proposer"][1]["messages"][-1]["content"]
    )
    assert [c["command"] for c in pipeline.record(result)["commands"]] == [c["command"] for c in THREE]


def test_a_bundle_is_cloned_in_a_sandbox_and_its_hooks_run_nowhere(pipeline, shop, tmp_path):
    trap = tmp_path / "trap"
    git = ["git", "-C", str(shop), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "all"], check=True)
    for hook in ("post-checkout", "post-merge"):
        place = shop / ".git" / "hooks" / hook
        place.write_text(f"#!/bin/sh\ntouch {trap}\n")
        place.chmod(0o755)
    bundle = tmp_path / "shop.bundle"
    subprocess.run([*git, "bundle", "create", "-q", str(bundle), "HEAD", "--all"], check=True)
    result = pipeline.run(bundle, scripts([SETTINGS, MOCK], [("submit", DECLARED)]))
    assert result.ended is Ended.INSTALLED, result
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert pipeline.record(result)["repository"]["commit"] == commit
    assert not trap.exists()
    files = pipeline.environment(result) / "repository"
    assert {str(p.relative_to(files)) for p in files.rglob("*") if p.is_file()} == set(SHOP)


def test_what_cannot_be_read_is_no_verdict(pipeline, tmp_path):
    (tmp_path / "broken.bundle").write_bytes(b"no bundle")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("broken.bundle", "it cannot be cloned in a sandbox"),
        ("empty", "there are no files in it"),
        ("nowhere", "it is neither a folder, nor a *.bundle, nor a git URL"),
    ):
        result = pipeline.run(tmp_path / name, {"proposer": [], "installer": []})
        assert result.ended is Ended.UNREADABLE and said in result.reason
    assert not list((pipeline.folder / "dropped").iterdir())
