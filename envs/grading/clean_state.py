"""Which files grading sandboxes start with: the agent's without those that decide how tests run, and the tests'."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PurePosixPath

from composer.contract import SandboxLimits
from composer.types import Task

CONFIG_FILES = frozenset(
    {"pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini"}
)
"""What pytest 9 looks for (`_pytest.config.findpaths.CONFIG_LOADERS_BY_NAME`)."""
RUNNERS = frozenset(
    """
    conftest.py noxfile.py .coveragerc .testr.conf .stestr.conf nose.cfg unittest.cfg
    makefile gnumakefile bsdmakefile justfile .justfile taskfile.yml taskfile.yaml rakefile .rspec phpunit.xml
    phpunit.xml.dist package.json .npmrc .yarnrc .yarnrc.yml .pnpmfile.cjs .mocharc.js .mocharc.cjs .mocharc.json
    .mocharc.yml .mocharc.yaml .nycrc .taprc .babelrc ctestlist.txt cmakelists.txt meson.build build.ninja
    build.gradle build.gradle.kts settings.gradle pom.xml build.xml build.sbt build.rs .bazelrc
    tox.toml hatch.toml pdm.toml uv.toml pixi.toml dodo.py fabfile.py sconstruct wscript manage.py
    deno.json deno.jsonc bunfig.toml turbo.json nx.json lerna.json gradlew mvnw .envrc
    .bashrc .bash_profile .bash_login .bash_aliases .profile .zshenv .zshrc .inputrc .pythonrc .pdbrc .gitconfig .netrc
    """.split()  # noqa: SIM905 - names by the dozen
)
"""Names, in small letters, of what says how tests run, in this language and others, or what a shell starts with."""
_RUNNER_SUFFIXES = (".mk", ".mak", ".make")
_RUNNER_CONFIG = re.compile(
    r"(jest|vitest|karma|ava|cypress|playwright|mocha|wdio|babel)\.(config|setup|conf)\.\w+|jest\.\w+"
)
TEST_FOLDERS = frozenset({"test", "tests", "__tests__", "__mocks__"})
_PROGRAM = r"(\.(py|sh|bash|zsh|pl|rb|[cm]?[jt]sx?|go|rs|c|cc|cpp|cs|java|kt|scala|php|lua|ex|exs|r|jl|ps1|bat))?"
_TEST_NAME = re.compile(
    r"test_.*|[^.]*_test(\..*)?"
    rf"|(run[-_]?)?tests?([-_][^.]*)?{_PROGRAM}"  # tests.py, run-tests.sh, test.sh
    rf"|.*[-_.]tests?{_PROGRAM}"  # a_tests.go, a.test.ts
    r"|.*\.spec\.[cm]?[jt]sx?|.*_spec\.rb"
    r"|.*(?-i:Tests?|TestCase|IT)\.(java|kt|scala|cs|groovy|php)",
    re.IGNORECASE,
)
STARTUP = frozenset({"sitecustomize", "usercustomize"})
INSTALLED = frozenset(
    {"site-packages", "dist-packages", "node_modules", ".git", ".hg", ".svn"}
    | {".tox", ".nox", ".mvn", ".cargo", ".gradle"}
)
"""Folders of what is installed and not written here, of runners' own, and of git's: hooks, settings, and the past."""
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".egg")
"""By which plugins are found."""
_WORD = re.compile(r"[^\s=:;&|()<>\[\]{},\"'`]+")
_ENTERED = re.compile(r"(?:\bcd|-C|--directory|--rootdir|\bPYTHONPATH|\bpythonpath)\s*[\s=]\s*(\[[^]]*\]|[^\s;&|]+)")
_SMALL_BYTES = 2**16
_PAGE_BYTES = 4096
"""What a file takes of a disk at least, and a page of one that lies in memory."""
RUNNER_MODULES = frozenset(
    """
    pytest _pytest py pluggy iniconfig packaging pygments exceptiongroup tomli toml colorama attr attrs more_itertools
    importlib_metadata zipp atomicwrites wcwidth six typing_extensions argcomplete pexpect xdist execnet coverage
    nose tox nox unittest2 composer_solution
    """.split()  # noqa: SIM905
)
"""What pytest and other runners import, some of it only in their older versions."""


def clean_state(
    task: Task,
    final: Mapping[str, bytes],
    *,
    restored: Sequence[str] = (),
    kept: Sequence[str] = (),
    tests: bool = True,
    command: str = "",
) -> dict[str, bytes]:
    """The files to grade: base state, the agent's changes, and the hidden tests over both.

    What the agent did to what decides is undone: such files are restored from the base state, also deleted ones, or
    left out where there were none. These are tests and their configuration, what runs them, what is installed, git's
    own files, compiled files (pytest would take a forged one for a test's own), and new modules that hide the standard
    library, pytest or a hidden test from the interpreter, in the working directory and in every folder from which the
    command or a test might import.

    Args:
        task: base state and hidden tests.
        final: every file the agent left behind.
        restored: patterns of more files that decide.
        kept: patterns of files that do not, whatever they look like; hidden tests still go over them.
        tests: whether tests, their configuration and what runs them are among these files.
        command: what runs the tests, a shell's command line.
    """
    rules = _Rules(task, tuple(restored), tuple(kept), tests, command)
    files = {path: content for path, content in final.items() if not rules.decides(path)}
    files = _without_collisions(files, rules.of_base())
    for hidden in task.hidden_tests:
        files = {path: content for path, content in files.items() if not _in_the_way(path, hidden)}
    return files | task.hidden_tests


def does_not_fit(task: Task, state: Mapping[str, bytes], limits: SandboxLimits) -> str:
    """Why the agent has left too much for a sandbox to be filled with it again; empty if it fits.

    What the task itself brings is not the agent's fault: a state that is no larger than the clean base state fits.
    Half of the disk is kept for what runs: the overlay and /dev/shm have their share of it too.
    """
    room = limits.disk_bytes // 2 // _PAGE_BYTES
    base = clean_state(task, task.files)
    for of, what, most in (
        (_num_entries, "files and folders", room),
        (_num_pages, f"pages of {_PAGE_BYTES} bytes", room),
        (_largest, "bytes in one file", limits.file_bytes),
    ):
        if (num := of(state)) > max(most, of(base)):
            return f"{num} {what} were left behind, of which a grading sandbox takes {most}"
    return ""


def _num_entries(files: Mapping[str, bytes]) -> int:
    folders: set[str] = set()
    for path in files:
        # From below, and no further than what was seen: a path may have thousands of parts.
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return len(files) + len(folders)


def _num_pages(files: Mapping[str, bytes]) -> int:
    return sum(-(-len(content) // _PAGE_BYTES) for content in files.values())


def _largest(files: Mapping[str, bytes]) -> int:
    return max(map(len, files.values()), default=0)


def test_files(
    task: Task, *, restored: Sequence[str] = (), kept: Sequence[str] = (), tests: bool = True, command: str = ""
) -> dict[str, bytes]:
    """The files of a sandbox that runs hidden tests and holds no file of the agent's; arguments as of `clean_state`.

    These are the hidden tests, and what of the base state belongs to tests: configuration, conftest.py, tests/.
    """
    return _Rules(task, tuple(restored), tuple(kept), tests, command).of_base() | task.hidden_tests


def _without_collisions(files: Mapping[str, bytes], restored: Mapping[str, bytes]) -> dict[str, bytes]:
    """Both together; a file gives way where a restored one needs a folder, and a folder where it needs a file."""
    folders = {str(folder) for path in restored for folder in PurePosixPath(path).parents}

    def collides(path: str) -> bool:
        return path in folders or any(str(folder) in restored for folder in PurePosixPath(path).parents)

    return {path: content for path, content in files.items() if not collides(path)} | dict(restored)


@dataclass(frozen=True)
class _Rules:
    """Tells which files belong to the tests and not to the solution."""

    task: Task
    restored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    tests: bool = True
    command: str = ""

    @cached_property
    def _environments(self) -> set[str]:
        """Folders of the base state that are virtual environments."""
        return {path.rpartition("/")[0] for path in self.task.files if path.rpartition("/")[2] == "pyvenv.cfg"}

    def of_base(self) -> dict[str, bytes]:
        """Those of the base state."""
        return {path: content for path, content in self.task.files.items() if self.decides(path)}

    def decides(self, path: str) -> bool:
        """Whether a file does."""
        if any(fnmatchcase(path, pattern) for pattern in self.kept):
            return False
        if any(fnmatchcase(path, pattern) for pattern in self.restored):
            return True
        p = PurePosixPath(path)
        stems = {_stem(part) for part in p.parts}
        if STARTUP & stems or p.suffix in (".pyc", ".pth") or "__pycache__" in p.parts:
            return True
        if not INSTALLED.isdisjoint(p.parts) or any(part.endswith(_METADATA) for part in p.parts):
            return True
        if self._environments and any(str(folder) in self._environments for folder in p.parents):
            return True
        if self.tests and _runs_tests(p):
            return True
        return path not in self.task.files and self._hides(p)

    def _hides(self, p: PurePosixPath) -> bool:
        """Whether a new file, or a folder that it is in, would be imported in the place of what runs tests."""
        for depth, part in enumerate(p.parts):
            is_importable = depth + 1 < len(p.parts) or p.suffix in (".py", ".so")
            folder = "/".join(p.parts[:depth])
            if "/".join(p.parts[: depth + 1]) in self._packages:
                continue  # of the base state, which so hides what it hides
            if is_importable and _stem(part) in RUNNER_MODULES and self._may_be_on_the_path(folder):
                return True
            if is_importable and _stem(part) in sys.stdlib_module_names and folder in self._on_the_path:
                return True
        return False

    def _may_be_on_the_path(self, folder: str) -> bool:
        """Whether somebody might import from a folder of the base state: it is no package, or a command names it."""
        return folder in self._on_the_path or (folder in self._folders and folder not in self._packages)

    @cached_property
    def _packages(self) -> set[str]:
        return {path.rpartition("/")[0] for path in self.task.files if path.rpartition("/")[2] == "__init__.py"}

    @cached_property
    def _folders(self) -> set[str]:
        return {str(f) for path in (*self.task.files, *self.task.hidden_tests) for f in PurePosixPath(path).parents}

    @cached_property
    def _on_the_path(self) -> set[str]:
        """Folders from which modules are imported: where a test lies, and what a command or a configuration names."""
        found = {path.rpartition("/")[0] for path in self.task.hidden_tests if path.endswith(".py")}
        texts = [self.command]
        for path, content in (self.task.files | self.task.hidden_tests).items():
            p = PurePosixPath(path)
            if len(content) <= _SMALL_BYTES and (p.suffix == ".sh" or _says_how(p)):
                texts.append(content.decode(errors="replace"))
        for text in texts:
            named = {folder for word in _WORD.findall(text) for folder in _folders(word)}
            # Where the command goes, modules lie, whatever they are elsewhere.
            words = [word for words in _ENTERED.findall(text) for word in _WORD.findall(words)]
            entered = {folder for word in words for folder in _folders(word)}
            found |= (named - self._packages) | entered
        return {"", *found}


def _folders(word: str) -> list[str]:
    """Folders of the working directory that a command may mean: by `./a/`, `$PWD/a` and `a` the same, by `/x/a` two."""
    word = re.sub(r"^\$\{?\w+\}?/", "", word)
    parts = [part for part in word.split("/") if part not in ("", ".")]
    most = len(parts) if word.startswith("/") else min(len(parts), 1)
    return ["/".join(parts[start:]) for start in range(most)]


def _runs_tests(p: PurePosixPath) -> bool:
    return _says_how(p) or bool(_TEST_NAME.fullmatch(p.name)) or not TEST_FOLDERS.isdisjoint(p.parts[:-1])


def _says_how(p: PurePosixPath) -> bool:
    name = p.name.lower()
    by_name = p.name in CONFIG_FILES or name in RUNNERS or name.endswith(_RUNNER_SUFFIXES)
    return by_name or bool(_RUNNER_CONFIG.fullmatch(name))


def _in_the_way(path: str, hidden: str) -> bool:
    """Whether a file stands where a hidden test goes, or would be imported in its place."""
    p, h = PurePosixPath(path), PurePosixPath(hidden)
    if p in h.parents or h in p.parents:
        return True
    beside = p.parts[: len(h.parts)]
    return beside[:-1] == h.parts[:-1] and _stem(beside[-1]) == h.stem


def _stem(name: str) -> str:
    """The name under which Python would import a file or a folder."""
    return name.split(".", 1)[0]
