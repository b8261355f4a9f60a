"""Reads what test programs say of single tests: pytest's summary (`-rA`) and JUnit's XML. All of it is untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

_SUMMARY = re.compile(rb"^=+ short test summary info =+\s*$", re.MULTILINE)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?:\[\d+\] )?(.*)$")
_PASSED = frozenset({"PASSED", "XPASS", "XFAIL"})


def read_summary(output: bytes) -> dict[str, bool]:
    """The lines below pytest's last `short test summary info`: node id -> whether the test passed.

    Expected failures count as passed, as they do for pytest; skipped tests are left out.
    """
    found: dict[str, bool] = {}
    _, *summaries = _SUMMARY.split(output)
    for line in summaries[-1].decode(errors="replace").splitlines() if summaries else ():
        match = _LINE.match(line)
        if match is None or match[1] == "SKIPPED":
            continue
        # Of a test that passed there is nothing more to say.
        node_id = match[2] if match[1] == "PASSED" else match[2].split(" - ", 1)[0]
        found[node_id] = match[1] in _PASSED and found.get(node_id, True)
    return found


def read_junit(content: bytes) -> dict[str, bool]:
    """The cases of a JUnit report: `<classname>.<name>` -> whether the test passed; skipped ones are left out.

    Raises:
        ValueError: it is no such report.
    """
    text = content.decode()  # and nothing that a parser would guess
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("it defines entities")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"it is no XML: {error}") from None
    found: dict[str, bool] = {}
    for case in root.iter("testcase"):
        children = {child.tag for child in case}
        if "skipped" in children and not children & {"failure", "error"}:
            continue
        name = ".".join(part for part in (case.get("classname", ""), case.get("name", "")) if part)
        found[name] = not children & {"failure", "error"} and found.get(name, True)
    return found


def junit_name(node_id: str) -> str:
    """What JUnit calls a test of pytest's: `tests/test_a.py::TestB::test_c[1]` is `tests.test_a.TestB.test_c[1]`."""
    path, *names = node_id.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *names])


def not_passed(found: dict[str, bool], required: Iterable[str]) -> list[str]:
    """Those of the required tests that failed or did not run."""
    return [name for name in required if not found.get(name, False)]
