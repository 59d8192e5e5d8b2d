"""What the attention of a model's layers reads and computes, by window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.sim.timing.models import Model

Contexts = npt.NDArray[np.int64]


class AttentionGroup(NamedTuple):
    """Layers with one window, taken together: what their attention reads and computes."""

    window: int | None
    bytes_per_token: int
    """KV bytes of one token in all layers of the group."""
    prefill_flops: float = 0.0
    """FLOPS per pair of a prompt token and one that it attends to: 2 x heads x (q_dim + v_dim) a layer."""
    decode_flops: float = 0.0
    """FLOPS per token that a decode step attends to. More than in prefill for MLA, which decodes in the
    latent space: 2 x heads x (latent + rope + latent) a layer."""

    def pairs(self, start: int, count: int) -> float:
        """Tokens that the prompt tokens ``start .. start + count - 1`` attend to, added up.

        >>> AttentionGroup(None, 0).pairs(2, 3), AttentionGroup(4, 0).pairs(2, 3)
        (12.0, 11.0)
        """
        if self.window is None:
            return count * (start + (count + 1) / 2)
        growing = min(max(self.window - start, 0), count)  # these do not fill the window yet
        return growing * (start + (growing + 1) / 2) + (count - growing) * self.window

    def tokens_read(self, start: int, count: int) -> int:
        """Tokens whose K and V the same prompt tokens read, each once."""
        end = start + count
        return end if self.window is None else min(end, self.window - 1 + count)

    def resident(self, contexts: Contexts) -> Contexts:
        """Tokens that a decode step of sequences with these contexts reads, per sequence."""
        return contexts if self.window is None else np.minimum(contexts, self.window)


def attention_groups(model: Model) -> tuple[AttentionGroup, ...]:
    """Bytes and FLOPS of a model's attention, by window. O(layers)."""
    found: dict[int | None, AttentionGroup] = {}
    for layer in model.spec.layers:
        prefill = 2.0 * model.num_q_heads * (model.q_head_dim + model.v_head_dim)
        decode = 2.0 * model.num_q_heads * (layer.head_dim + layer.value_dim)
        old = found.get(layer.window, AttentionGroup(layer.window, 0))
        found[layer.window] = AttentionGroup(
            layer.window,
            old.bytes_per_token + layer.bytes_per_token(model.spec.dtype),
            old.prefill_flops + prefill,
            old.decode_flops + decode,
        )
    return tuple(found.values())
