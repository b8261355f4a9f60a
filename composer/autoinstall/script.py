"""The install script: what the installer did that worked, in order, for a shell to do again.

A call with a `command` goes in as it is, one with `path` and `content` as the writing of that file; calls that failed
and those that only look are left out. Whether that is enough is tried out (installer.py): a step that failed may have
changed something all the same.
"""

from __future__ import annotations

import base64
import posixpath
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer.contract import ToolResult
from composer.types import ToolCall

RUN = 'if command -v bash > /dev/null; then exec bash "$1"; else exec sh "$1"; fi'
"""For `sh -c`: runs a script in the shell that tools use."""


@dataclass
class Script:
    """Grows with the installer's work."""

    workdir: str
    steps: list[str] = field(default_factory=list)

    def add(self, call: ToolCall, result: ToolResult) -> None:
        """Take up a call, if it may have changed the machine and has worked."""
        if not result.ok:
            return
        given = call.arguments
        if isinstance(command := given.get("command"), str):
            self.steps.append(command)
        elif isinstance(path := given.get("path"), str) and isinstance(content := given.get("content"), str):
            self.steps.append(_writing(posixpath.join(self.workdir, path), content))

    def text(self, name: str, variables: Sequence[str] = ()) -> str:
        """The script.

        Args:
            name: of the repository.
            variables: names of the variables that commands get beside it.
        """
        head = f"# Sets up a machine for {name}, whose files lie in {self.workdir}. Made by `composer autoinstall`."
        more = [f"# Commands also get the variables of environment.yaml: {', '.join(variables)}."] if variables else []
        return "\n".join(["#!/bin/sh", head, *more, f"cd {shlex.quote(self.workdir)}", "", *self.steps]) + "\n"


def _writing(path: str, content: str) -> str:
    encoded = textwrap.fill(base64.b64encode(content.encode(errors="replace")).decode(), 100)
    quoted = shlex.quote(path)
    return f"mkdir -p {shlex.quote(posixpath.dirname(path))}\nbase64 -d > {quoted} <<'EOF'\n{encoded}\nEOF"
