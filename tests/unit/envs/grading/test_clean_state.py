"""Which files reach the grading sandbox."""

from __future__ import annotations

import pytest
from _pytest.config import findpaths

from composer.types import Task
from envs.grading.clean_state import CONFIG_FILES, clean_state

BASE = {
    "main.py": b"old",
    "test_main.py": b"visible",
    "tests/data.txt": b"data",
    "pyproject.toml": b"[project]",
    "calendar.py": b"their own",
}
HIDDEN = {"test_hidden.py": b"hidden", "tests/unit/test_deep.py": b"deep"}
TASK = Task("t", "", BASE, HIDDEN)


def test_the_agents_solution_stays():
    final = {**BASE, "main.py": b"new", "pkg/helper.py": b"h", "notes.md": b"n", "calendar.py": b"edited"}
    assert clean_state(TASK, final) == {**final, **HIDDEN}


def test_files_that_the_agent_removed_stay_removed_but_tests_come_back():
    assert clean_state(TASK, {"notes.md": b"n"}) == {
        "notes.md": b"n",
        "test_main.py": b"visible",
        "tests/data.txt": b"data",
        "pyproject.toml": b"[project]",
        **HIDDEN,
    }


@pytest.mark.parametrize("path", ["test_main.py", "tests/data.txt", "pyproject.toml"])
def test_changed_tests_and_configuration_are_restored(path):
    assert clean_state(TASK, {**BASE, path: b"forged"}) == {**BASE, **HIDDEN}


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pkg/conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "setup.cfg",
        "tox.ini",
        "sitecustomize.py",
        "usercustomize/__init__.py",
        "test_new.py",
        "new_test.py",
        "tests/helper.py",
        "__pycache__/test_hidden.cpython-311-pytest-9.2.0.pyc",
        "pkg/__pycache__/x.pyc",
        "main.pyc",
        "evil.pth",
        "pytest.py",
        "_pytest/__init__.py",
        "pluggy.py",
        "json.py",
        "random/__init__.py",
        "math.cpython-311-x86_64-linux-gnu.so",
        "test_hidden.py/file",
        "test_hidden/__init__.py",
        "test_hidden.cpython-311-x86_64-linux-gnu.so",
        "tests/unit",
        "tests/unit/test_deep/__init__.py",
        "GNUmakefile",
        "build/rules.mk",
        "package.json",
        "web/jest.config.js",
        "jest.setup.ts",
        "run_tests.sh",
        "bin/run-tests",
        "app/tests.py",
        "src/a.test.ts",
        "src/a.spec.tsx",
        "pkg/a_test.go",
        "src/main/FooTest.java",
        "spec/a_spec.rb",
        "web/__tests__/a.js",
        "evil-1.0.dist-info/entry_points.txt",
        "evil.egg-info/entry_points.txt",
        ".git/config",
        ".git",
        "vendor/.git/hooks/pre-commit",
        "node_modules/.bin/jest",
        ".local/lib/python3.11/site-packages/usercustomize/__init__.py",
        ".local/lib/python3.11/site-packages/pytest.py",
        "a/b/sitecustomize.py",
        "exceptiongroup.py",
    ],
)
def test_new_files_that_decide_how_tests_run_are_left_out(path):
    assert clean_state(TASK, {**BASE, path: b"forged"}) == {**BASE, **HIDDEN}


@pytest.mark.parametrize("path", ["test_main.py/x", "test_main.py/deep/er", "tests", "pyproject.toml/x"])
def test_what_stands_where_a_restored_file_goes_gives_way(path):
    final = {"main.py": b"new", path: b"in the way", "test_main": b"beside", "tests.txt": b"beside"}
    assert clean_state(TASK, final) == {
        "main.py": b"new",
        "test_main.py": b"visible",
        "tests/data.txt": b"data",
        "pyproject.toml": b"[project]",
        "tests.txt": b"beside",
        **HIDDEN,
    }


@pytest.mark.parametrize(
    "path",
    [
        *("json.txt", "json", "src/json.py", "latest.py", "contest.py", "hidden.py", "a/main.py", "load_test_data.py"),
        *("attest.go", "Latest.java", "tests.txt", "my.spec", "gitconfig", "makefile.txt", "a/package.json.md"),
    ],
)
def test_names_that_only_look_alike_stay(path):
    assert clean_state(TASK, {**BASE, path: b"mine"}) == {**BASE, **HIDDEN, path: b"mine"}


def test_every_configuration_file_of_this_pytest_is_known():
    assert set(findpaths.CONFIG_LOADERS_BY_NAME) == CONFIG_FILES


def test_what_runs_tests_is_restored_unless_the_task_has_the_agent_change_it():
    base = {"Makefile": b"make", "tools/run.sh": b"run", "env/pyvenv.cfg": b"home", "env/bin/pytest": b"tool"}
    task = Task("t", "", base, {})
    final = dict.fromkeys(base, b"forged") | {"env/lib/evil.py": b"new", "main.py": b"new"}
    restored = {"env/pyvenv.cfg": b"home", "env/bin/pytest": b"tool", "main.py": b"new"}
    assert clean_state(task, final) == {**restored, "Makefile": b"make", "tools/run.sh": b"forged"}
    found = clean_state(task, final, restored=("tools/*",), kept=("Make*",))
    assert found == {**restored, "Makefile": b"forged", "tools/run.sh": b"run"}


def test_without_tests_only_what_would_be_imported_in_the_runners_place_is_undone():
    final = {**BASE, "test_main.py": b"mine", "conftest.py": b"mine", "Makefile": b"mine"}
    forged = {"pytest.py": b"", "json.py": b"", "x.pth": b"", "e.dist-info/entry_points.txt": b"", ".git/config": b""}
    assert clean_state(Task("t", "", BASE, {}), final | forged, tests=False) == final


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("backend/pytest.py", "cd backend && python3 -m pytest -q tests"),
        ("backend/pytest.py", "sh backend/check.sh"),
        ("backend/_pytest/__init__.py", "sh check.sh"),
        ("backend/json.py", "cd backend && python3 -m pytest"),
        ("src/pluggy.py", "PYTHONPATH=src python3 -m pytest"),
        ("src/random.py", "PYTHONPATH=$PWD/src:$PYTHONPATH python3 -m pytest"),
        ("shop/pytest.py", "(cd ./shop/; python3 -m pytest)"),
        ("shop/queue.py", "cd /work/shop && python3 -m pytest"),
        ("lib/json.py", "pytest"),
        ("new/unittest/__init__.py", "make -C new"),
        ("api/json.py", "pytest"),
        ("api/py.py", "pytest"),
    ],
)
def test_what_would_hide_a_runner_from_a_folder_is_left_out(path, command):
    base = {"backend/main.py": b"", "shop/__init__.py": b"", "tools/run.sh": b"cd tools\n"}
    base |= {"pyproject.toml": b"[tool.pytest.ini_options]\npythonpath = ['lib']\n"}
    task = Task("t", "", base, {"api/test_api.py": b"hidden"})
    assert path not in clean_state(task, {**base, path: b"forged"}, command=command)


@pytest.mark.parametrize("path", ["shop/queue.py", "shop/coverage.py", "shop/six/a.py", "new/json.py", "attr/new.py"])
def test_a_package_may_have_modules_with_the_names_of_others(path):
    base = {"shop/__init__.py": b"", "attr/__init__.py": b"", "main.py": b""}
    task = Task("t", "", base, {"test_it.py": b"hidden"})
    assert path in clean_state(task, {**base, path: b"mine"}, command="python3 -m pytest --cov=shop tests")


@pytest.mark.parametrize(
    "path", ["tox.toml", "manage.py", ".cargo/config.toml", ".mvn/jvm.config", "gradlew", ".tox/x"]
)
def test_what_other_runners_read_is_restored(path):
    assert path not in clean_state(TASK, {**BASE, path: b"forged"})
