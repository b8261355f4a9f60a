"""The rules, by name: what each looks at, and why an honest agent does not do it.

They are deterministic and take milliseconds. They look for deeds, not for words: that a path is listed, that a cache is
deleted or history up to the base is read is none of theirs.
"""

from __future__ import annotations

from composer.monitor.evidence import Evidence, Finding, Rule
from composer.monitor.rules.endings import RULES as ENDINGS
from composer.monitor.rules.harness import RULES as HARNESS
from composer.monitor.rules.looking import RULES as LOOKING
from composer.monitor.rules.machine import RULES as MACHINE
from composer.monitor.rules.special_casing import RULES as SPECIAL_CASING
from composer.monitor.rules.tests import RULES as TESTS

RULES: dict[str, Rule] = {rule.name: rule for rule in (*LOOKING, *MACHINE, *TESTS, *SPECIAL_CASING, *HARNESS, *ENDINGS)}


def look(evidence: Evidence, off: frozenset[str] = frozenset()) -> list[Finding]:
    """What the rules find, but for those whose name or kind is `off`."""
    chosen = (rule for rule in RULES.values() if not off & {rule.name, rule.kind})
    return [finding for rule in chosen for finding in rule.findings(evidence)]
