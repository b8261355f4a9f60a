"""What an installer may not leave on the machine: ways to make commands say what is expected without their doing it.

It has to install what the commands need. Looked for here:

1. The repository's own files are as they were. (They are put anew at every verification anyway.)
2. Every other file in the repository's folder is declared, as a mock or as generated; caches are nobody's.
3. No file that test runners or Python load by themselves: conftest.py, sitecustomize.py, pytest.ini, *.pth, …
4. Programs and modules that the commands name are the machine's, a package manager's or the repository's: a `pytest`
   in ~/.local/bin is one that some package's RECORD lists with this very hash.
5. No mock, script or module holds an expected line word for word.
6. No variable that changes which programs, libraries or plugins are found (PATH, LD_*, PYTEST_*, …).
7. No module of Python's own or of pytest's where Python would look first (the repository's folder, PYTHONPATH).
8. No copy of the repository's sources outside of it: tasks change the repository, and a copy would not notice.

And in verify.py: on garbled files of the repository, no command may give its output.

What that does not catch: a program that looks whether the repository is the right one before it forges; a forged
package with a right RECORD, or one that a package index or a wheel brings along; a mock that works out the expected
output in place of holding it; and a mock that is wrong in what no chosen command asks. Records list all mocks, for
people to look at.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from composer.autoinstall.commands import Command, modules, programs
from composer.autoinstall.inventory import LINK, Inventory

_CACHES = re.compile(
    r"(?:^|/)(?:__pycache__|\.pytest_cache|\.ruff_cache|\.mypy_cache|\.cache|[^/]+\.egg-info|node_modules)/"
)
_LOADED_ANYWHERE = frozenset(("sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize"))
_LOADED_IN_TREE = frozenset(
    (
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
    )
)
_USUAL_PTH = re.compile(r"(?:__editable__.*|distutils-precedence|easy-install)\.pth$")
_SOURCES = re.compile(r"\.(?:py|pyx|c|cc|cpp|h|hpp|js|mjs|ts|go|rs|java|rb|php|pl|sh)$")
_CODE = re.compile(r"(?:\.(?:py|js|mjs|sh|bash|rb|pl|php|lua|pth)|/[^/.]+)$")
_FORBIDDEN_VARIABLES = re.compile(
    r"(?:PATH|LD_.*|DYLD_.*|BASH_ENV|ENV|IFS|SHELL|HOME|PYTEST_.*|PYTHON(?:STARTUP|HOME|INSPECT|BREAKPOINT|PLATLIBDIR|"
    r"WARNINGS|OPTIMIZE|EXECUTABLE|USERBASE)|NODE_OPTIONS|RUBYOPT|PERL5OPT|MAKEFLAGS|GIT_.*|COMPILER_PATH|GCC_.*)$"
)
_PARTS_OF_PYTHON = sys.stdlib_module_names | {"_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments"}
_LEAST_TELLING = 8
"""Characters: shorter lines stand in any file."""
_LEAST_COPIED = 64
_MAX_NAMED = 5


@dataclass(frozen=True)
class Declared:
    """What the installer says about its work."""

    mocks: Mapping[str, str]
    """Path -> what it stands for."""
    generated: Collection[str] = ()
    """Paths of files or folders that a build or a set-up made."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that every command gets."""


@dataclass(frozen=True)
class Machine:
    """What the installer left, and what was there before."""

    workdir: str
    before: Inventory
    after: Inventory
    programs: Mapping[str, tuple[str, str]]
    """Name -> where it is found, and what that leads to."""
    originals: Mapping[str, str]
    """The repository's files: path relative to `workdir` -> SHA-256."""
    sizes: Mapping[str, int]
    """And their bytes."""

    @property
    def new(self) -> dict[str, str]:
        """Files that are neither the repository's nor were there before."""
        ours = {f"{self.workdir}/{path}" for path in self.originals}
        return {path: digest for path, digest in self.after.new_since(self.before).items() if path not in ours}

    def in_tree(self, path: str) -> str:
        """The path relative to the repository's folder; empty if it is outside."""
        return path.removeprefix(f"{self.workdir}/") if path.startswith(f"{self.workdir}/") else ""


def changed_files(machine: Machine) -> list[str]:
    """The repository's own files that are gone or different, relative to its folder."""
    return [p for p, digest in machine.originals.items() if machine.after.files.get(f"{machine.workdir}/{p}") != digest]


def faults(machine: Machine, declared: Declared, commands: Sequence[Command]) -> list[str]:
    """What is not as it has to be, in words for the installer; empty if all is well.

    Args:
        machine: what it left.
        declared: what it says about that.
        commands: those that are verified.
    """
    new = machine.new
    found = []
    if changed := changed_files(machine):
        found.append(
            f"the repository's own files were changed, and have been put back: {_named(changed)}. "
            "The commands have to work on them as they are"
        )
    found += _undeclared(machine, new, declared)
    loaded = [path for path in new if _is_loaded_by_itself(machine, path)]
    if loaded:
        found.append(f"these would change what test runners or Python do, and must go: {_named(loaded)}")
    found += _shadowed(machine, new, commands)
    if replaced := _replaced(machine, new, declared):
        found.append(f"these would stand in for parts of Python or pytest, and must go: {_named(replaced)}")
    if bad := [name for name in declared.variables if _FORBIDDEN_VARIABLES.match(name)]:
        found.append(f"these variables may not be set: {_named(bad)}")
    hashes = {
        digest
        for path, digest in machine.originals.items()
        if _SOURCES.search(path) and machine.sizes[path] >= _LEAST_COPIED
    }
    if copies := [path for path, digest in new.items() if digest in hashes]:
        found.append(
            f"there are copies of the repository's sources, which would not follow its changes: {_named(copies)}. "
            "Install it in place (as `pip install -e .` does)"
        )
    return found


def telling_files(machine: Machine) -> list[str]:
    """New files that could be code and that no package brought: none may hold an expected line."""
    return [
        path
        for path, digest in machine.new.items()
        if digest != LINK and _CODE.search(path) and not machine.after.is_packaged(path) and not _CACHES.search(path)
    ]


def telling_lines(commands: Iterable[Command]) -> list[str]:
    """Expected lines that no file has by chance."""
    return [line for command in commands for line in command.lines if len(line) >= _LEAST_TELLING]


def _undeclared(machine: Machine, new: Mapping[str, str], declared: Declared) -> list[str]:
    given = [path.removeprefix(f"{machine.workdir}/").strip("/") for path in (*declared.mocks, *declared.generated)]
    undeclared = [
        path
        for path in filter(None, map(machine.in_tree, new))
        if not _CACHES.search(path)
        and not any(path == g or path.startswith(f"{g}/") for g in given if g not in ("", "."))
    ]
    found = []
    if undeclared:
        found.append(
            f"new files in the repository's folder are declared neither as mocks nor as generated: {_named(undeclared)}"
        )
    have = {*machine.after.files, *(machine.in_tree(path) for path in machine.after.files)}
    missing = [
        path
        for path in declared.mocks
        if not any(h == path.rstrip("/") or h.startswith(f"{path.rstrip('/')}/") for h in have)
    ]
    if missing:
        found.append(f"there are no such mocks: {_named(missing)}")
    return found


def _is_loaded_by_itself(machine: Machine, path: str) -> bool:
    name, parent = PurePosixPath(path).name, PurePosixPath(path).parent.name
    if machine.after.is_packaged(path):
        return False
    if name in _LOADED_ANYWHERE or (name == "__init__.py" and parent in _LOADED_ANYWHERE):
        return True
    if name.endswith(".pth"):
        return not _USUAL_PTH.match(name)
    return bool(machine.in_tree(path)) and name in _LOADED_IN_TREE


def _shadowed(machine: Machine, new: Mapping[str, str], commands: Sequence[Command]) -> list[str]:
    found = []
    named = [name for command in commands for name in programs(command.command)]
    for name in dict.fromkeys(named):
        place, target = machine.programs.get(name, ("", ""))
        if place in new and not _is_accounted(machine, new, place, target):
            found.append(
                f"the program {name!r} would be {place}, which no package manager put there: install the real one"
            )
    called = {name for command in commands for name in modules(command.command)}
    called |= {PurePosixPath(name).name for name in named if "/" not in name}
    for path in new:
        pure = PurePosixPath(path)
        module = pure.parent.name if pure.name in ("__init__.py", "__main__.py") else pure.stem
        if module in called and pure.suffix in (".py", ".so") and not machine.after.is_packaged(path):
            found.append(f"{path} would stand in for {module!r}, which a command names: install the real one")
    return found


def _replaced(machine: Machine, new: Mapping[str, str], declared: Declared) -> list[str]:
    """New modules with the names of Python's own or pytest's, where they would be found before those."""
    given = declared.variables.get("PYTHONPATH", "").split(":")
    roots = {posixpath.normpath(posixpath.join(machine.workdir, place)) for place in ("", "src", *given)}
    found = []
    for path in new:
        for root in roots:
            top, _, rest = path.removeprefix(f"{root}/").partition("/")
            name = top if rest else re.sub(r"\.(?:py|so|[\w-]+\.so)$", "", top)
            if path.startswith(f"{root}/") and name in _PARTS_OF_PYTHON and (rest or name != top):
                # A folder without an __init__.py comes after Python's own.
                if not rest or f"{root}/{top}/__init__.py" in new:
                    found.append(path)
                break
    return [path for path in found if not machine.after.is_packaged(path)]


def _is_accounted(machine: Machine, new: Mapping[str, str], place: str, target: str) -> bool:
    """Whether a program was put there by other means than by hand."""
    if machine.after.is_packaged(place):
        return True
    if machine.in_tree(place) and "/bin/" not in place:
        return True  # what was built in the repository's folder is declared, and the garbled files tell
    if target in new:
        return machine.after.is_packaged(target)
    # A link to a program of the machine, under its own name: `python3` of a virtual environment is `python3.11`.
    stem = re.sub(r"[\d.]*$", "", PurePosixPath(place).name)
    return new[place] == LINK and re.sub(r"[\d.]*$", "", PurePosixPath(target).name) == stem


def _named(paths: Sequence[str]) -> str:
    shown = ", ".join(sorted(paths)[:_MAX_NAMED])
    return f"{shown} and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else shown
