"""Hugging Face folders: write a trained model as one, and check one before training starts from it.

An exported folder has weights (safetensors with an index), `config.json`, `generation_config.json` and the tokenizer;
`transformers` and vLLM load it as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from composer.errors import ConfigError, TrainingError
from composer.models.base import BALANCING_BIAS, hf_config, hf_parameter_shapes
from composer.models.trainer import TitanTrainer
from composer.schema import Dtype, ModelConfig

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
_FILE_BYTES = 5 * 2**30


def export(
    trainer: TitanTrainer, model: ModelConfig, folder: Path, tokenizer: Path | None = None, dtype: Dtype = Dtype.float32
) -> None:
    """Write the current weights as a Hugging Face folder. Collective.

    The folder appears whole or not at all; one that is already there is replaced.

    Args:
        trainer: whose weights.
        model: their description.
        folder: where to.
        tokenizer: a tokenizer folder whose files are copied.
        dtype: the format of the weights in the files.

    Raises:
        TrainingError: the weights are not exactly those that the family's checkpoint format asks for.
    """
    partial = folder.with_name(folder.name + ".partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    # Pipeline stages are the outermost axis: the first rank of each stage writes the layers of that stage.
    stage, within = divmod(dist.get_rank(), dist.get_world_size() // trainer.parallel_dims.pp)
    tensors = trainer.hf_state_dict()
    if within == 0:
        written = _write(tensors, partial, stage, getattr(torch, dtype.value))
    else:
        written = {}
        for _ in tensors:  # gathering is collective
            pass
    everyone: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, written)
    if first:
        files = {name: entry for part in everyone for name, entry in part.items()}
        _check({name: shape for name, (_, shape, _) in files.items()}, model)
        index = {
            "metadata": {"total_size": sum(size for _, _, size in files.values())},
            "weight_map": {name: file for name, (file, _, _) in sorted(files.items())},
        }
        (partial / _INDEX).write_text(json.dumps(index, indent=1))
        _write_configs(partial, model, tokenizer, dtype)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def _write(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, stage: int, dtype: torch.dtype
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Write files of at most `_FILE_BYTES`. Returns name -> (file, shape, bytes)."""
    written: dict[str, tuple[str, tuple[int, ...], int]] = {}
    pending: dict[str, torch.Tensor] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        if pending:
            file = f"model-{stage:03d}-{number:05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            written.update({n: (file, tuple(t.shape), t.numel() * t.element_size()) for n, t in pending.items()})
            pending.clear()
            number += 1

    size = 0
    for name, tensor in tensors:
        wanted = tensor.dtype if name.endswith(BALANCING_BIAS) else dtype
        value = tensor.to("cpu", wanted).contiguous().clone()
        if size + value.numel() * value.element_size() > _FILE_BYTES:
            flush()
            size = 0
        pending[name] = value
        size += value.numel() * value.element_size()
    flush()
    return written


def _check(found: dict[str, tuple[int, ...]], model: ModelConfig) -> None:
    problem = _difference(found, hf_parameter_shapes(model))
    if problem:
        raise TrainingError(
            f"The exported weights of {model.name} do not match their format: {problem}. This is a "
            "bug; the checkpoint itself is intact."
        )


def _difference(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str:
    """What is missing, too much or of the wrong shape, in words; empty if nothing is."""
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = sorted(n for n in wanted.keys() & found.keys() if tuple(found[n]) != tuple(wanted[n]))
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing, such as {missing[0]}")
    if extra:
        parts.append(f"{len(extra)} unknown, such as {extra[0]}")
    if shapes:
        parts.append(f"{shapes[0]} is {found[shapes[0]]} instead of {wanted[shapes[0]]}")
    return "; ".join(parts)


def _write_configs(folder: Path, model: ModelConfig, tokenizer: Path | None, dtype: Dtype) -> None:
    special: dict[str, int | None] = {"eos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, folder / name)
        special = _special_tokens(folder)
    (folder / "config.json").write_text(json.dumps(hf_config(model, dtype=dtype.value, **special), indent=1))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=1))


def _special_tokens(folder: Path) -> dict[str, int | None]:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}

    def find(key: str) -> int | None:
        token = config.get(key)
        return ids.get(token["content"] if isinstance(token, dict) else token)

    return {"eos_token_id": find("eos_token"), "pad_token_id": find("pad_token")}


def check_checkpoint(folder: Path, model: ModelConfig) -> None:
    """Compare the tensors in a folder with what `model` needs, reading headers only.

    Raises:
        ConfigError: a tensor is missing or has another shape; nothing has been loaded.
    """
    found = dict(_headers(folder))
    wanted = hf_parameter_shapes(model)
    if model.tie_embeddings:
        found.pop("lm_head.weight", None)  # a copy of the shared embedding; some writers keep it
    known = {name: shape for name, shape in found.items() if name in wanted}
    problem = _difference(known, wanted)
    if problem:
        raise ConfigError(
            "model.checkpoint",
            str(folder),
            f"does not fit the model: {problem}; correct the sizes of `model` or give the folder of another checkpoint",
        )


def _headers(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
                yield name, tuple(file.get_slice(name).get_shape())
