"""Publishing: whole or not at all, bit-exact, and one plain sentence where it cannot."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer.errors import WeightSyncError
from composer.schema import Dtype
from composer.types import Probe
from composer.weight_sync.publish import publish
from composer.weight_sync.store import VersionStore

PROBE = Probe(token_ids=[1, 2], log_probs=[-0.5])


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore.create(tmp_path / "s")


def test_tensors_arrive_bit_for_bit_with_checksums(store: VersionStore) -> None:
    stacked = torch.randn(3, 4, 5)
    tensors = {f"experts.{i}": stacked[i] for i in range(3)}  # views of one memory, as a trainer's experts are
    tensors["turned"] = torch.randn(4, 2).t()
    tensors["half"] = torch.randn(7, dtype=torch.bfloat16)
    report = publish(store, 1, tensors.items(), PROBE)

    manifest = store.manifest()
    assert list(manifest.tensors) == list(tensors)
    assert manifest.tensors["half"].dtype == "bfloat16"
    assert manifest.tensors["turned"].shape == [2, 4]
    (name,) = manifest.files
    content = (report.directory / name).read_bytes()
    assert manifest.files[name].blake2b == hashlib.blake2b(content, digest_size=32).hexdigest()
    assert manifest.files[name].bytes == report.bytes == len(content)
    loaded = load_file(report.directory / name)
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())


def test_weights_travel_in_the_generators_format(store: VersionStore) -> None:
    # bfloat16 has 7 bits behind the point: 2^-8 and 3 * 2^-8 lie halfway, and go to the even neighbour
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1e-3])
    weight, bias = "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.gate.e_score_correction_bias"
    report = publish(store, 1, [(weight, values), (bias, values)], PROBE, Dtype.bfloat16)
    loaded = load_file(report.directory / "weights-00000.safetensors")
    assert loaded[weight].dtype == torch.bfloat16
    assert loaded[weight].tolist() == [1.0, 1.0, 1 + 2**-6, pytest.approx(-1e-3, rel=2**-8)]
    assert torch.equal(loaded[bias], values), "vLLM keeps it in float32"
    assert {n: i.dtype for n, i in store.manifest().tensors.items()} == {weight: "bfloat16", bias: "float32"}


def test_a_number_too_large_for_the_format_is_refused(store: VersionStore) -> None:
    with pytest.raises(WeightSyncError, match="tensor='a'.*not finite"):
        publish(store, 1, [("a", torch.tensor([3.4e38]))], PROBE, Dtype.bfloat16)


def test_files_are_split_at_their_limit(store: VersionStore) -> None:
    tensors = [(f"t{i}", torch.zeros(100)) for i in range(5)]  # 400 bytes each
    publish(store, 1, tensors, PROBE, max_shard_bytes=900)
    files = [info.file for info in store.manifest().tensors.values()]
    assert files == [f"weights-0000{i}.safetensors" for i in (0, 0, 1, 1, 2)]


def test_versions_grow(store: VersionStore) -> None:
    publish(store, 5, [("a", torch.zeros(1))], PROBE)
    with pytest.raises(WeightSyncError, match="version=5: version 5 is published already"):
        publish(store, 5, [("a", torch.zeros(1))], PROBE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(store: VersionStore, value: float) -> None:
    with pytest.raises(WeightSyncError, match="tensor='b'.*not finite"):
        publish(store, 1, [("a", torch.zeros(2)), ("b", torch.tensor([0.0, value]))], PROBE)
    assert [p.name for p in store.directory.iterdir()] == ["owner.json"]


def test_a_tensor_given_twice_is_refused(store: VersionStore) -> None:
    with pytest.raises(WeightSyncError, match="tensor='a'.*twice"):
        publish(store, 1, [("a", torch.zeros(2)), ("a", torch.zeros(2))], PROBE)


def test_an_error_of_the_trainer_leaves_nothing_half_written(store: VersionStore) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise RuntimeError("a rank died")

    with pytest.raises(WeightSyncError, match="a rank died"):
        publish(store, 1, tensors(), PROBE)
    assert [p.name for p in store.directory.iterdir()] == ["owner.json"]


def test_a_full_device_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        store = VersionStore.create(small / "s")
        publish(store, 1, [("a", torch.zeros(1000))], PROBE)
        with pytest.raises(WeightSyncError, match="weight_sync.directory=.*it is full"):
            publish(store, 2, [("a", torch.zeros(10**6))], PROBE)
        assert store.versions() == [1]
        publish(store, 3, [("a", torch.ones(1000))], PROBE)
        assert store.latest() == 3
    finally:
        subprocess.run(["umount", str(small)], check=True)
