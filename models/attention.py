"""Grouped-query attention over a cache and a token tree: the only door to the kernels."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.layers import Maker, rotate
from pallas_kernels.tree_attention import Implementation, tree_attention
from parallel.comm import Comm


class LayerKV(NamedTuple):
    """Keys and values that one layer made for tree nodes, keys rotated.

    They enter the cache only when their nodes are committed.
    """

    k_BNKA: jax.Array
    v_BNKA: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every block of one forward pass shares.

    Attributes:
        cos_BNa: RoPE cosines of the queries' positions, a = A/2.
        sin_BNa: RoPE sines.
        mask_BNM: bool, which tree nodes each query sees, itself included.
        length_B: int32, cached tokens of each row.
        kernel: implementation of tree attention; None for the platform's own.
    """

    cos_BNa: jax.Array
    sin_BNa: jax.Array
    mask_BNM: jax.Array
    length_B: jax.Array
    kernel: Implementation | None = dataclasses.field(metadata={"static": True})


class Attention(nnx.Module):
    """Projections, RoPE and tree attention. Query head h shares kv head h // (H/K)."""

    def __init__(self, config: ModelConfig, make: Maker):
        D, HA = config.d_model, config.num_heads * config.head_dim
        self.q_DHA = make("DHA", D)
        self.k_DKA = make("DKA", D)
        self.v_DKA = make("DKA", D)
        self.o_HAD = make("HAD", HA)
        bias = config.attention_bias
        self.q_bias_HA = make("HA", D) if bias else None
        self.k_bias_KA = make("KA", D) if bias else None
        self.v_bias_KA = make("KA", D) if bias else None
        self.o_bias_D = make("D", HA) if bias else None

    def __call__(
        self,
        x_BND: jax.Array,
        ctx: Context,
        cached: tuple[jax.Array, jax.Array],
        earlier: LayerKV | None,
        comm: Comm,
    ) -> tuple[jax.Array, LayerKV]:
        """Attends from N nodes to the cache and to the tree.

        Args:
            x_BND: normed hidden states.
            ctx: shared by all blocks.
            cached: `(k_BKSA, v_BKSA)` of this layer, read only.
            earlier: K/V of tree nodes from earlier passes, columns before the queries' own in
                `ctx.mask_BNM`; None if the tree is seen whole.
            comm: communication.

        Returns:
            The layer's output [B, N, D] and the K/V of these N nodes.
        """
        projected = comm.column_matmul(x_BND, self.q_DHA[...], self.k_DKA[...], self.v_DKA[...])
        biases = (self.q_bias_HA, self.k_bias_KA, self.v_bias_KA)
        q_BNHA, k_BNKA, v_BNKA = map(_biased, projected, biases)
        q_BNHA = rotate(q_BNHA, ctx.cos_BNa, ctx.sin_BNa)
        kv = LayerKV(rotate(k_BNKA, ctx.cos_BNa, ctx.sin_BNa), v_BNKA)
        tree = kv
        if earlier is not None:
            tree = LayerKV(
                *(jnp.concatenate(pair, axis=1) for pair in zip(earlier, kv, strict=True))
            )
        mixed_BNHA, _ = tree_attention(
            q_BNHA,
            *cached,
            ctx.length_B,
            tree.k_BNKA,
            tree.v_BNKA,
            ctx.mask_BNM,
            implementation=ctx.kernel,
        )
        out_BND = comm.row_matmul(mixed_BNHA, self.o_HAD[...])
        return _biased(out_BND, self.o_bias_D), kv


def _biased(out: jax.Array, bias: nnx.Param | None) -> jax.Array:
    return out if bias is None else out + jnp.broadcast_to(bias[...], out.shape)
