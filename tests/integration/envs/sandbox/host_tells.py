"""Tells that are this machine's and no sandbox's: the same probe, run outside of any."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from composer.contract import Finding
from envs.sandbox.realism.audit import PROBE
from envs.sandbox.realism.tells import judge, parse


def lacked_here(findings: Sequence[Finding]) -> set[str]:
    """Of what a sandbox lacks, that which this machine lacks itself: programs and manuals.

    A sandbox has this machine's own /usr, or that of an image which is made of it (docker_image.py), and cannot have
    more. Nothing else is taken out of a count: what the kernel tells (`kernel`, `hypervisor`) counts on every machine.
    """
    done = subprocess.run(["sh", str(PROBE)], capture_output=True, text=True, check=False, timeout=60)
    here = {verdict.tell.name: verdict.shown for verdict in judge(parse(done.stdout))}
    lacked = set()
    for finding in findings:
        if finding.name == "missing tools" and set(finding.detail.split()) <= set(here[finding.name].split()):
            lacked.add(finding.name)
        if finding.name == "no manuals" and here[finding.name]:
            lacked.add(finding.name)
    return lacked
