"""The experts' load: measured and balanced over the tokens that a loss depends on, and over no padding.

torchtitan counts every token of a batch. Padding tokens are all alike and go to the same experts, so that with 40 % of
padding a balanced router seemed three times as unbalanced as it was, and the balancing bias worked against it.

With `titan.py` and `titan_layers.py` the only place that touches torchtitan's internals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakTensorKeyDictionary
from torchtitan.components.optimizer import register_moe_load_balancing_hook

from composer.types import NO_LABEL

_padding = WeakTensorKeyDictionary()
"""The positions of a batch -> where it is padding. Every block is given the positions, also when it is computed again
for the backward pass and when a pipeline has several batches under way."""


def without_loss(labels: Tensor, positions: Tensor) -> Tensor:
    """Where no loss depends on a token: from there on its document has no label, as in padding.

    Args:
        labels: int64 [B, L].
        positions: int64 [B, L]; a document starts where they are 0.

    Returns:
        bool [B, L].

    Example:
        >>> labels = torch.tensor([[NO_LABEL, 5, NO_LABEL, NO_LABEL, NO_LABEL, 7]])
        >>> without_loss(labels, torch.tensor([[0, 1, 2, 0, 1, 0]])).int().tolist()
        [[0, 0, 1, 1, 1, 0]]
    """
    places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    document = (positions == 0).cumsum(1)
    labelled = torch.where(labels != NO_LABEL, places, -1)
    last = torch.full((len(labels), labels.shape[1] + 1), -1, device=labels.device)
    last = last.scatter_reduce(1, document, labelled, "amax")
    return places > last.gather(1, document)


def mark_padding(positions: Tensor, padding: Tensor) -> None:
    """Say which tokens are not to count, before the model is called with `positions`; the very object is meant.

    Args:
        positions: int64 [B, L], this rank's part of them.
        padding: bool [B, L], from `without_loss`.
    """
    _padding[positions] = padding


def register_hooks(optimizers: Any, model_parts: list[Any], parallel_dims: Any) -> None:
    """Measure the experts' load at every optimizer step, then let torchtitan balance it where a bias is configured.

    `optimizers.worst_expert_load` is the largest count of tokens of one expert over the mean count, worst layer, all
    ranks: 1 is balance, `num_experts / experts_per_token` is collapse onto the same experts for every token.
    """
    optimizers.worst_expert_load = 0.0
    blocks = [block for part in model_parts for block in part.layers.values() if block.moe_enabled]
    layers = [block.moe for block in blocks]
    for block in blocks:
        _discount_padding(getattr(block, "_checkpoint_wrapped_module", block))
    groups = [mesh.get_group() for mesh in (parallel_dims.get_optional_mesh("loss"),) if mesh is not None]
    if parallel_dims.ep_enabled and parallel_dims.tp_enabled:  # each tensor rank then routes its part of the sequence
        groups.append(parallel_dims.get_mesh("tp").get_group())

    def record(*_: object) -> None:
        if not layers:
            return
        counts = torch.stack([_local(moe.tokens_per_expert_E) for moe in layers])
        for group in groups:
            torch.distributed.all_reduce(counts, group=group)
        optimizers.worst_expert_load = float((counts.amax(1) / counts.mean(1).clamp(min=1e-9)).max())
        if layers[0].load_balance_coeff is None:  # else torchtitan's hook, which runs after this one, resets them
            for moe in layers:
                moe.tokens_per_expert_E.zero_()

    optimizers.register_step_pre_hook(record)
    register_moe_load_balancing_hook(optimizers, model_parts, parallel_dims)


def _discount_padding(block: Any) -> None:
    """Take padding out of the counts of a block's experts, to which its forward pass adds every token."""
    moe, now = block.moe, {"padding": None}

    def look_up(_: object, args: tuple, kwargs: dict[str, Any]) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[2]
        now["padding"] = None if positions is None else _padding.get(positions)

    @torch.no_grad()
    def discount(_: object, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        padding, expert_ids = now["padding"], output[1]
        if padding is None or not moe.training:
            return
        if isinstance(expert_ids, DTensor):  # this rank may have routed a part of the sequence
            mesh, parts = expert_ids.device_mesh, expert_ids.placements
            whole = DTensor.from_local(padding, mesh, [Replicate()] * mesh.ndim, run_check=False)
            padding, expert_ids = whole.redistribute(placements=parts).to_local(), expert_ids.to_local()
        weights = padding[..., None].expand_as(expert_ids).flatten()
        counts = _local(moe.tokens_per_expert_E)
        counts.index_add_(0, expert_ids.flatten(), weights.to(counts.dtype), alpha=-1)

    block.register_forward_pre_hook(look_up, with_kwargs=True)
    moe.router.register_forward_hook(discount)


def _local(counts: Tensor) -> Tensor:
    return counts.to_local() if isinstance(counts, DTensor) else counts
