"""Whose a skip and an expected failure is: what the tests ask for is believed, and nothing that the solution does.

Each solution's way is a function of `main.py`, each has a test of its own, and one pytest runs them all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from supervised_pytest import run  # noqa: E402

FORGED = """
import concurrent.futures, functools, sys, threading, unittest.mock, unittest
import pytest
from pytest import xfail as is_it, skip as was_it

def plain(): pytest.xfail("x")
exec(compile("import pytest\\ndef named(): pytest.xfail('x')", "tests/x.py", "exec"))
exec(compile("import pytest\\ndef as_pytest(): pytest.skip('x')", pytest.__file__, "exec"))
exec(compile("import pytest\\ndef as_library(): pytest.skip('x')", functools.__file__, "exec"))

def in_their_globals(): exec("pytest.skip('x')", sys._getframe(1).f_globals)
def of_unittest(): raise unittest.SkipTest("x")
mock = unittest.mock.Mock(side_effect=pytest.xfail.Exception("x"))
future = concurrent.futures.Future()
future.set_exception(pytest.skip.Exception("x"))
from_future = functools.partial(concurrent.futures.Future.result, future)

def writes_a_file():
    with open("conftest_x.py", "w") as file:
        file.write("import pytest\\ndef f(): pytest.skip('x')\\n")
    sys.path.insert(0, ".")
    import conftest_x
    conftest_x.f()

def item():
    frame = sys._getframe()
    while "item" not in frame.f_locals or not hasattr(frame.f_locals["item"], "add_marker"):
        frame = frame.f_back
    return frame.f_locals["item"]

def marks(): item().add_marker("xfail"); assert False
def marks_by_hand(): item().own_markers.append(pytest.mark.xfail.mark); assert False
def marks_elsewhere():
    thread = threading.Thread(target=item().add_marker, args=("xfail",))
    thread.start(); thread.join()
    assert False
def deputy(): sys._getframe(1).f_globals["needs_network"]()
def hides(): sys.modules["statistics"] = None

def expected(function):
    return pytest.mark.xfail(function)
replaced = lambda function: functools.partial(pytest.xfail, "x")
"""
NAMES = (
    *("plain", "named", "as_pytest", "as_library", "in_their_globals", "of_unittest", "mock", "from_future"),
    *("writes_a_file", "marks", "marks_by_hand", "marks_elsewhere", "deputy", "is_it", "was_it"),
)
HEAD = """
import unittest
import pytest, main

def needs_network(): pytest.skip("no network")

"""
TRICKED = (
    HEAD
    + "".join(
        f"def test_{name}():\n    main.{name}({'main' if name.endswith('_it') else ''})\n    assert True\n\n"
        for name in NAMES
    )
    + """
def test_hides():
    main.hides()
    pytest.importorskip("statistics")

@main.expected
def test_expected():
    assert False

class TestCase(unittest.TestCase):
    def test_of_unittest(self):
        main.of_unittest()

    def test_plain(self):
        main.plain()
"""
)
HONEST = (
    HEAD
    + """
skips = pytest.mark.skip
from unittest import SkipTest, skip
from pytest import xfail

@pytest.fixture
def network():
    assert main
    needs_network()

def test_in_the_test(): assert main; pytest.skip("x")
def test_in_a_fixture(network): pass
def test_in_a_helper(): needs_network()
def test_imported(): pytest.importorskip("no_such_module")
def test_raised(): raise SkipTest("x")
def test_exception(): raise pytest.skip.Exception("x")
def test_xfails(): xfail("x")
def test_adds(request):
    request.node.add_marker(pytest.mark.xfail(reason="x"))
    assert main.f() == 2

@skips(reason="x")
def test_marked(): pass

@pytest.mark.skipif(True, reason="x")
def test_if(): pass

@pytest.mark.xfail
def test_marked_to_fail(): assert main.f() == 2

@pytest.mark.xfail
def test_marked_and_passes(): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.xfail), pytest.param(3, marks=pytest.mark.skip)])
def test_of_many(a): assert a == main.f()

class TestCase(unittest.TestCase):
    def test_asks(self): self.skipTest("x")

    @skip("x")
    def test_decorated(self): pass

    @unittest.expectedFailure
    def test_fails(self): assert main.f() == 2

@unittest.skip("x")
class TestSkipped(unittest.TestCase):
    def test_a(self): pass
"""
)


def test_nothing_that_a_solution_skips_is_believed(tmp_path):
    code, report, output = run(tmp_path, FORGED, TRICKED)
    assert code != 0
    believed = [name for name, passed in report["found"].items() if passed]
    assert believed == [] and len(report["found"]) == len(NAMES) + 4, (believed, output)


def test_what_the_tests_ask_for_is_believed(tmp_path):
    code, report, output = run(tmp_path, "def f(): return 1\n", HONEST)
    assert (code, report["problem"], report["reasons"]) == (0, "", []), output
    passed = {name.rpartition("::")[2] for name, passed in report["found"].items() if passed}
    assert passed == {
        "test_adds", "test_marked_to_fail", "test_marked_and_passes", "test_of_many[1]", "test_of_many[2]", "test_fails"
    }  # fmt: skip


@pytest.mark.parametrize(
    "main",
    [
        "import pytest\npytest.skip('x', allow_module_level=True)\n",
        "import unittest\nraise unittest.SkipTest('x')\n",
        "import pytest, sys\nsys.modules['test_it'].pytestmark = pytest.mark.xfail\ndef f(): return 2\n",
        "exec(compile('import pytest; pytest.skip(\"x\", allow_module_level=True)', 'test_it.py', 'exec'))\n",
    ],
)
def test_nor_is_a_file_that_it_skips_or_marks(tmp_path, main):
    code, report, output = run(tmp_path, main, "import main\n\n\ndef test_a():\n    assert main.f() == 1\n")
    assert code != 0 and not any(report["found"].values()), output


def test_a_file_that_skips_itself_is_believed(tmp_path):
    test = "import pytest\n\npytest.importorskip('no_such_module')\n\n\ndef test_a():\n    assert True\n"
    code, report, output = run(tmp_path, "", test)
    assert code == 5 and not report["problem"], output


OVERWRITES = """
import pathlib
test = pathlib.Path("test_it.py")
if not hasattr(pathlib, "done"):
    pathlib.done, source = True, test.read_text()
    test.write_text("import main\\n\\n\\ndef test_a():\\n    assert True\\n")
"""
RESTORES = """
import importlib.util, pytest
import test_it
test.write_text(source)
"""


@pytest.mark.parametrize("more", ["", RESTORES])
def test_a_test_that_was_overwritten_before_it_was_loaded_has_failed(tmp_path, more):
    """By what conftest.py, or another file of tests, has imported before."""
    test = "import main\n\n\ndef test_a():\n    assert main.f() == 1\n"
    code, report, output = run(tmp_path, OVERWRITES + more + "def f(): return 2\n", test, conftest="import main\n")
    assert "1 passed" in output and code == 1, output
    assert report["found"] == {"test_it.py::test_a": False} and "its file was changed" in report["reasons"][0]
