"""Who had a test skipped, or its failure expected: tests, what is installed, or the code that they test.

Shipped beside reporter.py and like it: as source, for any version of Python and pytest that an image may have.

A file's name proves nothing, since who compiles code chooses it. A frame belongs to a file if the file's source,
compiled again, holds the same code; and the file to the tests if the grader knows its content (by SHA-256), or to what
is installed if it lies there and has lain there since before the tests began. Whatever is neither is the solution's.

And a frame is not enough, since a solution can be `pytest.xfail` itself, or an object of the standard library that
raises it. So the tests' own code must have asked for it, by name and on the line that was running.
"""

import ast
import hashlib
import os
import sys
import sysconfig
import threading
import time
import unittest

import pluggy
import pytest

_MARKS = ("skip", "skipif", "xfail")
_ASKING = ("skip", "xfail", "importorskip", "SkipTest", "skipTest", "skipif", "skipIf", "skipUnless")
_ASKED = frozenset(["pytest", "_pytest", "unittest", "nose"])
_INSTALLED = frozenset(["site-packages", "dist-packages"])
# Files of pytest's that skip tests on their own account: for marks, for unittest's decorators, for empty doctests.
_ASKING_FILES = frozenset(["skipping.py", "unittest.py", "doctest.py", "nose.py"])
_MAX_FRAMES = 200
_MAX_ALIASES = 3
_MAX_WRAPPERS = 20
TESTS, INSTALLED, FOREIGN = "tests", "installed", ""


class Witness:
    """A plugin that notes on each report of a skip or an expected failure whether it is believed, as `of_tests`."""

    def __init__(self, digests):
        """`digests`: of the tests' files, by path."""
        self._origins = Origins(digests.values())
        self._paths = {os.path.realpath(path) for path in digests}

    def changed(self, items):
        """Those tests that are not what their files held before anything ran: one file's code can overwrite another's.

        What is wrapped by code of elsewhere is not looked at.
        """
        for item in items:
            function = getattr(item, "obj", None)
            for _ in range(_MAX_WRAPPERS):
                function = getattr(function, "__wrapped__", function)
            code = getattr(function, "__code__", None)
            is_theirs = code is not None and os.path.realpath(code.co_filename) in self._paths
            if is_theirs and not self._origins.is_of_tests(code):
                yield item

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        """A phase of a test: what it raised is as yet what was raised."""
        of_unittest = getattr(item, "_excinfo", None)
        excinfo = of_unittest[0] if of_unittest else call.excinfo
        done = yield
        self._note(done.get_result(), item, excinfo)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        """A file."""
        done = yield
        report = done.get_result()
        call = getattr(report, "call", None)
        self._note(report, None, call and call.excinfo)

    def pytest_configure(self, config):
        """Before anything is collected."""
        self._origins.config = config

    def _note(self, report, item, excinfo):
        is_expected = hasattr(report, "wasxfail")
        of_tests, is_raised = self._origins.believes(item, excinfo, is_expected)
        if is_expected or report.skipped:
            report.of_tests, report.is_raised = of_tests, is_raised


class Origins:
    """Tells the tests' own skips and expected failures from those of what they test."""

    def __init__(self, digests):
        """Begin to note who makes marks; nothing of the solution's may have run yet. `digests`: of the tests' files."""
        from _pytest import outcomes
        from _pytest.assertion import rewrite
        from _pytest.mark import structures

        self._digests, self._began = frozenset(digests), time.time()
        self._outcome, self._xfail = outcomes.OutcomeException, outcomes.xfail.Exception
        self._skips = (outcomes.skip.Exception, self._xfail, unittest.SkipTest)
        self._rewrite_asserts = rewrite.rewrite_asserts
        self.config = None
        """pytest's, which says how `assert` is compiled."""
        self._kinds, self._sources, self._made, self._skipped = {}, {}, {}, []
        paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        paths += [path for path in sys.path if _INSTALLED.intersection(path.split("/"))]
        paths += [os.path.dirname(str(module.__file__)) for module in (outcomes, pytest, pluggy)]  # noqa: PTH120
        self._roots = tuple({os.path.realpath(path) + os.sep for path in paths if path})
        self._pytest = os.path.realpath(os.path.dirname(outcomes.__file__)) + os.sep  # noqa: PTH120
        # Whatever is running now, and the import system, which has no file.
        self._known, frame = _frozen(), sys._getframe()
        while frame is not None:
            self._known[id(frame.f_code)] = frame.f_code
            frame = frame.f_back
        self._watch(structures.Mark, lambda mark, codes: self._made.__setitem__(id(mark), (mark, codes)), _MARKS)
        self._watch(unittest.SkipTest, lambda _, codes: self._skipped.append(codes))

    def believes(self, item, excinfo, is_expected):
        """Whether a phase that was skipped, or whose failure is expected, ended as the tests wanted it.

        Args:
            item: the test; None for a file that was being collected.
            excinfo: what the phase raised, or None.
            is_expected: whether a failure was expected.

        Returns:
            Whether it is to be believed, and whether it was raised and not marked.
        """
        skipped, self._skipped = self._skipped, []
        error = excinfo.value if excinfo is not None else None
        if not isinstance(error, self._skips):
            return is_expected and self._marks_are_believed(item), False
        frames = _frames(error.__traceback__)
        kinds = [self._kind(code) for code, _, _ in frames]
        if TESTS not in kinds and isinstance(error.__context__, self._skips):  # unittest's, as pytest passes it on
            frames = _frames(error.__context__.__traceback__)
            kinds = [self._kind(code) for code, _, _ in frames]
        if FOREIGN in kinds or not self._is_missing(frames):
            return False, True
        if TESTS in kinds:
            code, line, _ = frames[len(kinds) - 1 - kinds[::-1].index(TESTS)]
            return self._asks(code, line), True
        asking = [code for code, _, _ in frames if self._of_pytest(code) != "outcomes.py"][-1:]
        name = self._of_pytest(asking[0]) if asking else ""
        if name == "skipping.py":
            return self._marks_are_believed(item), False
        if name == "unittest.py":
            is_static = asking[0].co_name == "addExpectedFailure" or _is_marked(item)
            asked = bool(skipped) and all(map(self._was_asked, skipped))
            return is_static or asked, not is_static
        # A test whose function is a solution's object would have been called by pytest itself.
        foreign = name and name not in _ASKING_FILES
        return bool(asking) and not foreign and bool(name or _is_package(asking[0].co_filename)), True

    def is_of_tests(self, code):
        """Whether code is what a file of the tests holds."""
        return self._kind(code) == TESTS

    def _marks_are_believed(self, item):
        marks = [mark for name in _MARKS for mark in (item.iter_markers(name) if item is not None else ())]
        made = [self._made.get(id(mark)) for mark in marks]
        is_static = getattr(getattr(item, "obj", None), "__unittest_expecting_failure__", False)
        return bool(marks or is_static) and all(each is not None and self._was_asked(each[1]) for each in made)

    def _was_asked(self, frames):
        """Whether what was made in these frames, the innermost first, is the tests' doing."""
        for code, line in frames or ():
            kind = self._kind(code)
            if kind == TESTS:
                return self._asks(code, line, "mark")
            if kind == FOREIGN:
                return False
        return bool(frames)

    def _watch(self, cls, note, names=()):
        """Note in which frames objects of a class are made."""
        usual, main = cls.__init__, threading.main_thread()

        def __init__(made, *args, **more):
            usual(made, *args, **more)
            if not names or (args[0] if args else more.get("name")) in names:
                codes, frame = [], sys._getframe(1) if threading.current_thread() is main else None
                while frame is not None and len(codes) < _MAX_FRAMES:
                    codes.append((frame.f_code, frame.f_lineno))
                    frame = frame.f_back
                note(made, codes)

        self._known[id(__init__.__code__)] = __init__.__code__
        cls.__init__ = __init__

    def _kind(self, code):
        key = (code, code.co_filename)  # code is equal to the same of another file
        if key not in self._kinds:
            self._kinds[key] = self._kind_of(code)
        return self._kinds[key]

    def _kind_of(self, code):
        if id(code) in self._known:
            return INSTALLED
        kind, keys, _ = self._source(code.co_filename)
        return kind if kind and _key(code) in keys else FOREIGN

    def _source(self, name):
        """Whose a file is, the keys of the code in it, and its tree."""
        path = os.path.realpath(name)
        if path not in self._sources:
            self._sources[path] = self._read(path)
        return self._sources[path]

    def _read(self, path):
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                source = file.read()
                changed = os.fstat(file.fileno()).st_ctime
        except (OSError, ValueError):
            return FOREIGN, frozenset(), None
        is_installed = path.startswith(self._roots) or bool(_INSTALLED.intersection(path.split("/")))
        if hashlib.sha256(source).hexdigest() in self._digests:
            kind = TESTS
        elif is_installed and changed <= self._began:
            kind = INSTALLED
        else:
            return FOREIGN, frozenset(), None
        try:
            keys = set(_keys(compile(source, path, "exec", dont_inherit=True)))
            tree = ast.parse(source, path)
            if kind == TESTS or (_is_package(path) and not path.startswith(self._pytest)):  # plugins are, too
                keys.update(_keys(self._rewritten(source, path)))
        except Exception:  # whatever cannot be compiled again is nobody's
            return FOREIGN, frozenset(), None
        return kind, keys, tree

    def _rewritten(self, source, path):
        tree = ast.parse(source, path)
        try:
            self._rewrite_asserts(tree, source, path, self.config)
        except TypeError:  # before pytest 5
            tree = ast.parse(source, path)
            self._rewrite_asserts(tree, path, self.config)
        return compile(tree, path, "exec", dont_inherit=True)

    def _asks(self, code, line, *more):
        """Whether the tests' code asks for a skip on this line, or for one more of these words."""
        _, _, tree = self._source(code.co_filename)
        names = _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and line in _lines(node):
                full = _full_name(_dotted(node), names).split(".")
                is_own = full[0] in ("self", "cls") and full[-1] == "skipTest"
                if is_own or (full[0] in _ASKED and not {*more, *_ASKING}.isdisjoint(full[1:])):
                    return True
        return False

    def _of_pytest(self, code):
        """The name of pytest's own file that it is from; empty if it is from elsewhere."""
        path = os.path.realpath(code.co_filename)
        return path.rpartition(os.sep)[2] if path.startswith(self._pytest) else ""

    def _is_missing(self, frames):
        """Whether what `importorskip` did not find is not there: a solution can hide what is."""
        from importlib.machinery import PathFinder

        for code, _, frame in frames:
            if code.co_name == "importorskip" and self._of_pytest(code) == "outcomes.py":
                name = str(frame.f_locals.get("modname", "")).split(".")[0]
                if frame.f_locals.get("mod") is None and PathFinder.find_spec(name) is not None:
                    return False
        return True


def _is_package(name):
    """Whether a file is of a package that was installed beside pytest."""
    parts = os.path.realpath(name).split("/")
    return bool(_INSTALLED.intersection(parts)) and "pluggy" not in parts


def _frames(traceback):
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno, traceback.tb_frame))
        traceback = traceback.tb_next
    return frames


def _is_marked(item):
    """Whether unittest's decorators are on a test or its class."""
    things = (
        getattr(item, "obj", None),
        getattr(getattr(item, "parent", None), "obj", None),
        getattr(item, "cls", None),
    )
    return any(getattr(thing, "__unittest_skip__", False) for thing in things)


def _keys(code):
    """Of code, and of all that is in it."""
    yield _key(code)
    for each in code.co_consts:
        if hasattr(each, "co_code"):
            yield from _keys(each)


def _key(code):
    """What two compilations of one source have in common, and code of another has not."""
    consts = hashlib.sha256()
    for each in code.co_consts:
        consts.update(repr(_key(each) if hasattr(each, "co_code") else _constant(each)).encode(errors="replace"))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_name, code.co_firstlineno, code.co_code, names, consts.hexdigest())


def _constant(value):
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return [_constant(each) for each in value] if isinstance(value, tuple) else (type(value).__name__, repr(value))


def _frozen():
    """By identity, the code of the import system, which has no file; there is nothing that these lines miss in it."""
    import importlib._bootstrap as first
    import importlib._bootstrap_external as second

    found, waiting = {}, [vars(first), vars(second)]
    while waiting:
        for each in list(waiting.pop().values()):
            each = getattr(each, "__func__", each)
            if isinstance(each, type) and each.__module__ in ("importlib._bootstrap", "importlib._bootstrap_external"):
                waiting.append(vars(each))
            for code in [each.__code__] if hasattr(each, "__code__") else []:
                found[id(code)] = code
    return found


def _imported(tree):
    """What a file's names stand for, where it has imported them or given them to what it has imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({each.asname: each.name for each in node.names if each.asname})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            names.update({each.id: _dotted(node.value) for each in node.targets if isinstance(each, ast.Name)})
    return names


def _full_name(name, names):
    for _ in range(_MAX_ALIASES):
        first, dot, rest = name.partition(".")
        name = names.get(first, first) + dot + rest
    return name


def _lines(node):
    return range(node.lineno, (getattr(node, "end_lineno", None) or node.lineno) + 1)


def _dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else ["?"]), *reversed(parts)])
