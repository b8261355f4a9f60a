"""Layers that take the place of torchtitan's: on CPU, and for context parallelism of latent attention.

With `titan.py` and `titan_experts.py` the only place that touches torchtitan's internals.

Shape suffixes as in torchtitan's `moe.py`: B batch, L sequence, D model, F expert features, E experts, R routed tokens,
N heads, H head features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models import deepseek_v3
from torchtitan.models.common import FlexAttention, Linear
from torchtitan.models.common.moe import GroupedExperts


class CpuAttention(FlexAttention):
    """`FlexAttention` has no backward on CPU; scaled-dot-product attention with the same mask takes its place.

    Still a `FlexAttention`, so that torchtitan builds masks for it and context parallelism wraps it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """No options of its own."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,  # noqa: N803
        attention_masks: BlockMask | torch.Tensor | None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; `attention_masks` is what `document_mask` returns, or a `BlockMask` under context parallelism."""
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = attention_masks
        if isinstance(mask, BlockMask):
            batch = mask.kv_num_blocks.shape[0]
            mask = create_mask(mask.mask_mod, batch, None, q.shape[2], k.shape[2], device=q.device.type)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


class CpuExperts(GroupedExperts):
    """Experts in the activations' own dtype. torchtitan casts expert GEMMs to bfloat16 whatever the model's dtype.

    In float32 the log-probabilities of trainer and generator agree to 1e-5; with bfloat16 experts routers flip.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """No options of its own."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """SwiGLU of each expert on its rows; rows are sorted by expert. [R, D] -> [R, D]."""
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        hidden = F.silu(self._grouped_mm(A=x_RD, B_t=w1.transpose(-2, -1), offs=ends))
        hidden = hidden * self._grouped_mm(A=x_RD, B_t=w3.transpose(-2, -1), offs=ends)
        return self._grouped_mm(A=hidden, B_t=w2.transpose(-2, -1), offs=ends)


class CpuGate(Linear):
    """A router's linear layer in float32. torchtitan asks autocast for it, which has no float32 on CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """No options of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torchtitan shards it by this name
        """[B, L, D] -> float32 [B, L, E]."""
        return F.linear(input.float(), self.weight.float())


class LatentAttention(deepseek_v3.model.Attention):
    """MLA whose context parallelism gathers the latents and not the keys and values made of them.

    torchtitan gathers `heads x (qk + v)` numbers a token; the normed latent and the one rotary key say the same in
    `kv_lora_rank + qk_rope_head_dim`: 71 times less at DeepSeek-V3's sizes. In exchange every rank expands the whole
    sequence. Used where tensor parallelism is off; without context parallelism it is torchtitan's attention.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(deepseek_v3.model.Attention.Config):
        """No options of its own."""

    context_group: str | None = None
    """The name of the context-parallel process group."""

    def gather_latents(self, group: str) -> None:
        """Gather over `group` from now on, and take torchtitan's own gathering off the inner attention."""
        self.context_group = group
        del self.inner_attention.forward  # the wrapper was set on the instance

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """[B, l, D] -> [B, l, D], l = L / ranks."""
        if self.context_group is None:
            return super().forward(x, attention_masks, positions)
        query = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        query = query.unflatten(-1, (-1, self.qk_head_dim))
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = self.rope(q_rope, k_rope.unsqueeze(2), positions)
        # The gather's backward sums over ranks. The gradient of wkv_b is each rank's part of it; FSDP, whose ranks
        # include those of the context axis, sums it.
        latent, k_rope = flex_cp_allgather(
            self.kv_norm(latent).contiguous(), k_rope.contiguous(), 1, self.context_group
        )
        expanded = self.wkv_b(latent).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
        out = self.inner_attention(
            torch.cat([q_nope, q_rope], dim=-1), key, value, attention_masks=attention_masks, scale=self.softmax_scale
        )
        return self.wo(out.flatten(2))
