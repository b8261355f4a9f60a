"""Which installed files a sandbox's Python gets: pytest and what it requires, and nothing else of the host's."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from composer.errors import SandboxStartError

_WANTED = "pytest"


def pytest_files() -> tuple[tuple[str, str], ...]:
    """The files of pytest and the distributions that it requires here.

    Returns:
        Pairs of the path on the host and the path relative to site-packages, bytecode included where it exists.

    Raises:
        SandboxStartError: pytest, or something that it requires, is not installed.
    """
    found: dict[str, str] = {}
    waiting, seen = [_WANTED], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as e:
            raise SandboxStartError(
                f"package={name!r} is not installed, but sandboxes with Python run pytest: "
                f"pip install {name}, or set python=false"
            ) from e
        waiting += [required for line in distribution.requires or [] if (required := _required(line))]
        for file in distribution.files or []:
            path = Path(str(distribution.locate_file(file)))
            # Scripts are recorded with paths that lead out of site-packages.
            if ".." not in file.parts and path.is_file():
                found[str(path)] = str(file)
    return tuple(sorted(found.items()))


def _required(line: str) -> str:
    """The name in a requirement, or "" if it does not apply to Linux with Python 3.11 without extras.

    The markers that pytest's own requirements use are few; reading them takes no parser of all of PEP 508.
    """
    requirement, _, marker = line.partition(";")
    name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if name is None or "extra ==" in marker or "win32" in marker:
        return ""
    bound = re.search(r"python_version\s*<\s*[\"']3\.(\d+)", marker)
    return "" if bound and int(bound[1]) <= 11 else name[0]
