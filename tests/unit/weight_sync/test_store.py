"""The version store: atomic versions, superseding, and leftovers of dead owners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from composer.errors import WeightSyncError
from composer.types import Probe
from composer.weight_sync.publish import publish
from composer.weight_sync.store import EMPTY_GRACE_S, VersionStore, default_directory, sweep

PROBE = Probe(token_ids=[1, 2, 3], log_probs=[-0.5, -0.25])


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("model.a", torch.full((2, 3), value)), ("model.b", torch.full((4,), value, dtype=torch.bfloat16))]


def test_a_new_store_is_empty_and_the_newest_version_supersedes(tmp_path: Path) -> None:
    store = VersionStore.create(tmp_path / "s", keep_versions=2)
    assert store.latest() is None
    with pytest.raises(WeightSyncError, match="nothing was published yet"):
        store.manifest()
    for version in (3, 7, 12):  # versions may be skipped
        publish(store, version, weights(version), PROBE)
    assert store.versions() == [7, 12]
    assert store.manifest().version == store.latest() == 12
    with pytest.raises(WeightSyncError, match=r"version=3: it is not among the published \[7, 12\]"):
        store.manifest(3)


def test_another_process_opens_what_one_created(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no store there"):
        VersionStore.open(tmp_path / "s")
    publish(VersionStore.create(tmp_path / "s"), 1, weights(1), PROBE)
    assert VersionStore.open(tmp_path / "s").manifest().probe == PROBE


def test_a_version_half_written_is_not_seen(tmp_path: Path) -> None:
    store = VersionStore.create(tmp_path / "s")
    (store.directory / ".publishing-5-1").mkdir()
    (store.directory / "v12").mkdir()  # no version: eight digits
    assert store.versions() == []


def test_damaged_manifests_are_named(tmp_path: Path) -> None:
    store = VersionStore.create(tmp_path / "s")
    publish(store, 1, weights(1), PROBE)
    path = store.path(1) / "manifest.json"
    good = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(WeightSyncError, match="manifest.json.*damaged"):
        store.manifest()
    path.write_text(json.dumps(good | {"format": 2}))
    with pytest.raises(WeightSyncError, match="format 2"):
        store.manifest()


def test_a_directory_in_use_is_refused_and_a_dead_owners_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "composer-x"
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    publish(VersionStore.create(directory, owner_pid=owner.pid), 4, weights(4), PROBE)
    with pytest.raises(WeightSyncError, match=f"process {owner.pid}"):
        VersionStore.create(directory)
    assert sweep(tmp_path) == 0
    owner.communicate(b"\n")
    assert VersionStore.create(directory).versions() == []


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(WeightSyncError, match="holds other files"):
        VersionStore.create(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match="cannot be written"):
        VersionStore.create(tmp_path / "file" / "s")


def test_sweep_removes_what_dead_owners_left_and_nothing_else(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    VersionStore.create(tmp_path / "composer-dead", owner_pid=owner.pid)
    VersionStore.create(tmp_path / "composer-live")
    elsewhere = VersionStore.create(tmp_path / "composer-elsewhere", owner_pid=owner.pid).directory / "owner.json"
    elsewhere.write_text(json.dumps(json.loads(elsewhere.read_text()) | {"host": "another-machine"}))
    inside = VersionStore.create(tmp_path / "composer-container", owner_pid=owner.pid).directory / "owner.json"
    inside.write_text(json.dumps(json.loads(inside.read_text()) | {"namespace": 1}))
    reused = VersionStore.create(tmp_path / "composer-reused").directory / "owner.json"
    reused.write_text(json.dumps(json.loads(reused.read_text()) | {"start": 1}))  # this id, another process
    (tmp_path / "composer-foreign").mkdir()
    (tmp_path / "composer-foreign" / "data").write_text("")
    for name, age in (("composer-killed-at-start", EMPTY_GRACE_S + 1), ("composer-starting", 0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    owner.communicate(b"\n")

    assert sweep(tmp_path) == 3
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [
        "composer-container",
        "composer-elsewhere",
        "composer-foreign",
        "composer-live",
        "composer-starting",
    ]
    assert sweep(tmp_path) == 0


def test_labels_are_plain_names() -> None:
    assert default_directory("quickstart-7.1") == Path("/dev/shm/composer-quickstart-7.1")
    with pytest.raises(WeightSyncError, match="label="):
        default_directory("../etc")


def test_remove_is_idempotent(tmp_path: Path) -> None:
    store = VersionStore.create(tmp_path / "s")
    store.remove()
    store.remove()
    assert not store.directory.exists()
