"""What the fork server is made of: whatever it imports, the processes of a solution find in their memory."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys
import envs.egress.gate, envs.egress.trust, envs.sandbox.forkserver

print([name for name in sys.modules if name.startswith("composer")])
"""


def test_nothing_of_the_framework_is_in_the_fork_server() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
