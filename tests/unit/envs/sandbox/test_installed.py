"""What the backend of installed environments gives to the one inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend
from envs.sandbox.installed import InstalledEnvironments


@pytest.mark.parametrize(("name", "kind"), [("bubblewrap", BubblewrapBackend), ("docker", DockerBackend)])
def test_the_run_is_the_one_insides_too(name: str, kind: type, tmp_path: Path) -> None:
    backend = InstalledEnvironments("label", name, {"egress": {"rules": [{"host": "pypi.org"}]}}, str(tmp_path))
    assert isinstance(backend.inside, kind) and backend.inside.run_label == "label"
    assert backend.inside.proxy is not None and backend.inside.proxy.log.parent == tmp_path / "egress"


@pytest.mark.parametrize("name", ["run_label", "run_dir"])
def test_what_the_run_gives_is_not_set_a_second_time(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        InstalledEnvironments("label", args={name: "mine"})
