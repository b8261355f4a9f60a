"""The image of the network's relay: this Python, for engines that can run it."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from envs.sandbox.docker import relay_image

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


@pytest.mark.parametrize(
    ("version", "info", "why"),
    [
        ({"Arch": ARCHITECTURE}, {"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}, ""),
        ({"Arch": "riscv64"}, {}, "the engine runs programs for riscv64"),
        ({"Arch": ARCHITECTURE}, {"SecurityOptions": ["name=userns"]}, "userns-remap"),
    ],
)
def test_which_engines_can_have_it(version: dict, info: dict, why: str) -> None:
    what, remedy = relay_image.why_not(version, info)
    assert why in what and bool(what) == bool(why) == bool(remedy)


def test_it_is_the_same_each_time_and_holds_what_it_needs_alone(tmp_path: Path) -> None:
    content = relay_image.archive()
    relay_image.archive.cache_clear()
    assert relay_image.archive() == content
    assert len(content) < 64 * 2**20
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = tar.getnames()
        tar.extractall(tmp_path, filter="fully_trusted")
    assert "product/envs/egress/relay.py" in names
    assert not [
        name for name in names if name.startswith("product/") and "egress" not in name and "__init__" not in name
    ]
    # With its own modules and libraries it can do what the relay does, apart from the rights that it lacks here.
    home = {"PYTHONHOME": f"{tmp_path}/python", "LD_LIBRARY_PATH": f"{tmp_path}/python/so"}
    program = "import os, sys; sys.path.insert(0, sys.argv[1]); from envs.egress import relay; print(os.__file__)"
    done = subprocess.run(
        [f"{tmp_path}/python/bin/python3", "-S", "-c", program, f"{tmp_path}/product"],
        capture_output=True, text=True, env=home, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{tmp_path}/python/lib/python3.{sys.version_info[1]}/os.py"
