"""What the local launcher finds before Ray starts."""

import shutil
import sys
import tempfile
from types import SimpleNamespace

import pytest

from launchers.local import LocalLauncher
from launchers.ray import RayLauncher


@pytest.mark.parametrize("excess", [0, 1])
def test_a_temporary_folder_too_long_for_sockets_is_found(monkeypatch, excess):
    launcher = LocalLauncher("label", {})
    ray = f"/composer-ray-{launcher.owner.pid}-{launcher.owner.start_time}"
    most = 107 - len(f"{ray}/session_2026-01-31_12-00-00_123456_1234567/sockets/plasma_store")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/".ljust(most + excess, "x"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    (found,) = (f for f in launcher.check() if f.name == "socket paths")
    assert found.ok is not bool(excess)
    assert f"set TMPDIR to a shorter path, at most {most} bytes" in found.remedy


@pytest.mark.parametrize("kind", [LocalLauncher, RayLauncher])
def test_a_start_that_was_interrupted_in_rays_import_can_be_stopped(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    kind("label", {}).stop()
