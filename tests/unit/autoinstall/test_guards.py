"""What an installer may leave on the machine, on inventories made up for the purpose."""

from __future__ import annotations

import hashlib

import pytest

from composer.autoinstall.commands import Command
from composer.autoinstall.guards import Declared, Machine, changed_files, faults, telling_files
from composer.autoinstall.inventory import LINK, Inventory, read_record

WORK = "/home/dev/project"
SOURCE = "def total(prices):\n    return sum(prices)\n" * 3
ORIGINALS = {"shop.py": SOURCE, "tests/test_shop.py": "", "LICENSE": "free " * 50}
COMMANDS = [Command("pytest -q", "", ("3 passed",)), Command("python3 -m build", "", ("built",))]


def digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def machine(
    new: dict[str, str], programs: dict[str, tuple[str, str]] | None = None, packaged=(), without=()
) -> Machine:
    ours = {f"{WORK}/{path}": digest(content) for path, content in ORIGINALS.items()}
    before = {**ours, "/home/dev/.bashrc": digest("rc")}
    after = {**before, **{path: content if content == LINK else digest(content) for path, content in new.items()}}
    for path in without:
        del after[path]
    return Machine(
        WORK,
        Inventory(before),
        Inventory(after, {path: after[path] for path in packaged}),
        programs or {},
        {path: digest(content) for path, content in ORIGINALS.items()},
        {path: len(content) for path, content in ORIGINALS.items()},
    )


def test_an_untouched_machine_and_an_honest_one_have_no_faults():
    assert faults(machine({}), Declared({}), COMMANDS) == []
    new = {
        f"{WORK}/bank.py": "mock",
        f"{WORK}/build/lib.so": "binary",
        f"{WORK}/shop.egg-info/PKG-INFO": "x",
        f"{WORK}/__pycache__/shop.pyc": "x",
        "/home/dev/venv/lib/python3.11/site-packages/__editable__.shop.pth": WORK,
        "/home/dev/venv/bin/python3": LINK,
        "/home/dev/venv/bin/pytest": "#!/home/dev/venv/bin/python3",
        "/home/dev/venv/lib/python3.11/site-packages/pytest/__main__.py": "x",
        "/home/dev/venv/lib/python3.11/site-packages/shop.dist-info/LICENSE": "free " * 50,
    }
    programs = {
        "pytest": ("/home/dev/venv/bin/pytest", "/home/dev/venv/bin/pytest"),
        "python3": ("/home/dev/venv/bin/python3", "/usr/bin/python3.11"),
    }
    packaged = [p for p in new if p.endswith(("bin/pytest", "__main__.py"))]
    declared = Declared({"bank.py": "the bank"}, ("build/",), {"SHOP": "1", "PYTHONPATH": "mocks"})
    assert faults(machine(new, programs, packaged), declared, COMMANDS) == []


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({f"{WORK}/shop.py": "changed"}, "own files were changed, and have been put back: shop.py."),
        ({f"{WORK}/extra.txt": "x"}, "declared neither as mocks nor as generated: extra.txt"),
        ({"/home/dev/.local/lib/sitecustomize.py": "x"}, "must go: /home/dev/.local/lib/sitecustomize.py"),
        ({"/home/dev/lib/usercustomize/__init__.py": "x"}, "must go"),
        ({"/home/dev/lib/evil.pth": "import os"}, "must go"),
        ({f"{WORK}/conftest.py": "x"}, "must go"),
        ({"/tmp/build/__main__.py": "x"}, "/tmp/build/__main__.py would stand in for 'build'"),
        ({f"{WORK}/pytest.py": "x"}, "would stand in for 'pytest'"),
        ({"/home/dev/lib/shop.py": SOURCE}, "copies of the repository's sources"),
    ],
)
def test_faults(new, said):
    assert any(said in fault for fault in faults(machine(new), Declared({}), COMMANDS))


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        (f"{WORK}/unittest.py", True),
        (f"{WORK}/src/json/__init__.py", True),
        ("/home/dev/mocks/_pytest/__init__.py", True),
        ("/home/dev/mocks/bank.py", False),
        ("/home/dev/other/json.py", False),
        ("/home/dev/mocks/bank/json.py", False),
        ("/home/dev/mocks/json/data.txt", False),
    ],
)
def test_parts_of_python_are_not_replaced(path, is_refused):
    declared = Declared({path: "x"}, (), {"PYTHONPATH": "/home/dev/mocks:../other/lib"})
    found = faults(machine({path: "x"}), declared, COMMANDS)
    assert any("parts of Python or pytest" in fault for fault in found) is is_refused


def test_files_that_load_by_themselves_matter_only_where_they_do():
    assert faults(machine({"/tmp/src/conftest.py": "x", "/tmp/src/setup.cfg": "x"}), Declared({}), COMMANDS) == []


def test_a_file_that_is_gone_was_changed():
    assert changed_files(machine({}, without=[f"{WORK}/tests/test_shop.py"])) == ["tests/test_shop.py"]


@pytest.mark.parametrize(
    ("target", "content", "is_right"),
    [
        ("/usr/bin/true", LINK, False),
        ("/usr/bin/pytest-3", LINK, False),
        ("/usr/bin/pytest3", LINK, True),
        ("/home/dev/.local/bin/pytest", "echo 3 passed", False),
    ],
)
def test_programs_on_path(target, content, is_right):
    place = "/home/dev/.local/bin/pytest"
    found = faults(machine({place: content}, {"pytest": (place, target)}), Declared({}), COMMANDS)
    assert (not any("the program 'pytest'" in fault for fault in found)) is is_right


def test_a_packaged_file_that_was_changed_afterwards_is_none():
    place = "/home/dev/venv/bin/pytest"
    honest = machine({place: "real"}, {"pytest": (place, place)}, packaged=[place])
    forged = Machine(
        WORK,
        honest.before,
        Inventory({**honest.after.files, place: digest("echo 3 passed")}, honest.after.packaged),
        honest.programs,
        honest.originals,
        honest.sizes,
    )
    assert faults(honest, Declared({}), COMMANDS) == []
    assert any("the program 'pytest'" in fault for fault in faults(forged, Declared({}), COMMANDS))


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "PYTEST_ADDOPTS", "BASH_ENV", "PYTHONSTARTUP", "NODE_OPTIONS"])
def test_variables_that_change_what_is_found(name):
    assert faults(machine({}), Declared({}, (), {name: "x"}), COMMANDS) == [f"these variables may not be set: {name}"]


def test_mocks_that_are_not_there():
    found = faults(machine({"/home/dev/mocks/a.py": "x"}), Declared({"bank.py": "", "/home/dev/mocks": ""}), COMMANDS)
    assert found == ["there are no such mocks: bank.py"]


def test_which_files_may_not_tell():
    new = {f"{WORK}/mock.py": "x", "/home/dev/tool": "x", f"{WORK}/out.o": "x", "/home/dev/link.py": LINK}
    assert telling_files(machine(new)) == [f"{WORK}/mock.py", "/home/dev/tool"]


def test_the_record_of_a_package():
    encoded = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of nothing, as PEP 376 writes it
    record = f'../../../bin/tool,sha256={encoded},0\na.py,,\n"b,c.py",sha256=AAE,2\n\nd.py,md5=xx,1\n'.encode()
    assert read_record(record, "/v/lib/python3.11/site-packages") == {
        "/v/bin/tool": hashlib.sha256(b"").hexdigest(),
        "/v/lib/python3.11/site-packages/a.py": "",
        "/v/lib/python3.11/site-packages/b,c.py": "0001",
        "/v/lib/python3.11/site-packages/d.py": "",
    }
