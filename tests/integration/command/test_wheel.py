"""What is installed from a built wheel: the same configs, found as pkg://composer.conf, and the same command."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPOSE_ALL = """
import sys
from importlib import resources
from pathlib import Path
import composer
from composer.compose import HydraSession
from composer.config_files import check_file
from composer.plan import make_plan
assert Path(composer.__file__).is_relative_to(sys.argv[1]), composer.__file__
conf = resources.files("composer.conf")
files = sorted(p for p in Path(str(conf)).rglob("*.yaml"))
groups = [(str(p.parent.relative_to(Path(str(conf)))), p.stem) for p in files if p.parent != Path(str(conf))]
# A group within a group is in no list of defaults: it is added.
options = [f"{'+' * ('/' in group)}{group}={name}" for group, name in groups if not group.startswith("hydra")]
with HydraSession() as session:
    for option in options:
        config = session.compose([option]).config
        if option.startswith("experiment"):
            make_plan(config)
for path in files:
    dict(check_file(path, ""))
print(len(files))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked where nothing of the repository is."""
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    source.mkdir()
    for name in ("composer", "conf", "envs", "launchers"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp / "site")
    return tmp / "site"


def run(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_every_file_of_conf_is_in_it_and_composes(installed: Path, tmp_path: Path) -> None:
    result = run(installed, "-c", COMPOSE_ALL, str(installed), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len(list((ROOT / "conf").rglob("*.yaml")))


def test_the_command_plans(installed: Path, tmp_path: Path) -> None:
    result = run(installed, "-m", "composer", "plan", "+experiment=composer2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "kimi_k2_5-composer2" in result.stdout
    assert not list(tmp_path.iterdir())


def test_its_configs_are_open_to_other_packages(installed: Path, tmp_path: Path) -> None:
    package = tmp_path / "acme_conf"
    (package / "mix").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "mix" / "acme.yaml").write_text(
        (ROOT / "conf/mix/quickstart.yaml").read_text().replace("80000", "81920")
    )
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{tmp_path}"}
    words = [
        "-m",
        "composer",
        "plan",
        "hydra.searchpath=[pkg://acme_conf]",
        "mix=acme",
        "--cfg",
        "job",
        "-p",
        "mix.phases.pretrain",
    ]
    result = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "tokens: 81920" in result.stdout, result.stderr
