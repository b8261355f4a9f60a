"""What a worker checks before it touches a weight."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from composer.errors import WeightSyncError
from composer.types import Probe
from composer.weight_sync.load import WeightLoader, check_names
from composer.weight_sync.publish import publish
from composer.weight_sync.store import VersionStore

PROBE = Probe(token_ids=[1, 2], log_probs=[-0.5])
CHECKPOINT = {"embed": torch.zeros(4, 2), "experts.0": torch.zeros(2, 2), "experts.1": torch.zeros(2, 2)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    save_file(CHECKPOINT, tmp_path / "checkpoint" / "model.safetensors")
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    return tmp_path / "checkpoint"


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore.create(tmp_path / "store")


@pytest.fixture
def worker(checkpoint: Path) -> WeightLoader:
    """A worker as vLLM makes it: the extension and the model's config."""
    loader = WeightLoader()
    loader.model_config = SimpleNamespace(model=str(checkpoint))
    return loader


def test_the_checkpoints_tensors_pass(store: VersionStore, worker: WeightLoader) -> None:
    publish(store, 1, CHECKPOINT.items(), PROBE)
    assert worker.composer_stage(str(store.path(1)), 1) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts.1": None}, "tensor='experts.1': shape missing in version 1, "),
        ({"experts.9": torch.zeros(1)}, "tensor='experts.9': shape \\[1\\] in version 1, missing"),
        ({"embed": torch.zeros(5, 2)}, "tensor='embed': shape \\[5, 2\\] in version 1, \\[4, 2\\]"),
    ],
)
def test_other_tensors_are_refused(store: VersionStore, checkpoint: Path, change: dict, message: str) -> None:
    tensors = {n: t for n, t in (CHECKPOINT | change).items() if t is not None}
    publish(store, 1, tensors.items(), PROBE)
    with pytest.raises(WeightSyncError, match=message):
        check_names(store.manifest(), checkpoint)


def test_only_a_tied_output_layer_may_be_named_or_not(store: VersionStore, checkpoint: Path) -> None:
    publish(store, 1, (CHECKPOINT | {"lm_head.weight": torch.zeros(4, 2)}).items(), PROBE)
    with pytest.raises(WeightSyncError, match="tensor='lm_head.weight'"):
        check_names(store.manifest(), checkpoint)
    (checkpoint / "config.json").write_text('{"tie_word_embeddings": true}')
    check_names(store.manifest(), checkpoint)


def test_a_flipped_bit_is_found(store: VersionStore, worker: WeightLoader) -> None:
    report = publish(store, 1, CHECKPOINT.items(), PROBE)
    path = report.directory / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    error = worker.composer_stage(str(report.directory), 1)
    assert "weights-00000.safetensors" in error and "damaged" in error


def test_a_truncated_or_missing_file_is_found(store: VersionStore, worker: WeightLoader) -> None:
    report = publish(store, 1, CHECKPOINT.items(), PROBE)
    path = report.directory / "weights-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "cannot be read" in worker.composer_stage(str(report.directory), 1)
    path.unlink()
    assert "cannot be read" in worker.composer_stage(str(report.directory), 1)


def test_another_version_or_none_is_found(store: VersionStore, worker: WeightLoader) -> None:
    report = publish(store, 1, CHECKPOINT.items(), PROBE)
    assert "it holds version 1, not 2" in worker.composer_stage(str(report.directory), 2)
    assert "superseded" in worker.composer_stage(str(store.path(2)), 2)


def test_a_model_that_refuses_says_so(store: VersionStore, worker: WeightLoader) -> None:
    publish(store, 1, CHECKPOINT.items(), PROBE)
    assert worker.composer_stage(str(store.path(1)), 1) == ""
    assert "did not take the weights" in worker.composer_swap()  # this worker has no model
