"""Random initial weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True)
class SeededNormal:
    """Initialises one parameter from its own random stream, so that a seed gives the same model on every mesh.

    torchtitan draws all parameters from one stream; sharded and unsharded models then start differently.
    """

    seed: int
    name: str
    std: float

    def __call__(self, parameter: torch.Tensor) -> None:
        """Fill `parameter`, a tensor or a DTensor of which every rank holds a shard."""
        key = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(key[:8]) >> 1)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        full.normal_(std=self.std, generator=generator)
        if isinstance(parameter, DTensor):  # every rank has drawn the whole tensor and keeps its own shard
            mesh = parameter.device_mesh
            whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
            # By hand: copy_ of DTensors refuses a parameter that has fewer rows than there are ranks.
            full = whole.redistribute(placements=parameter.placements).to_local()
            parameter = parameter.to_local()
        parameter.copy_(full)
