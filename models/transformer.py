"""The decoder: embed, blocks, head. One `__call__` trains, prefills and verifies trees."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Attention, Context, Implementation, LayerKV
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.layers import MLP, Maker, RMSNorm, head_logits, maker, normalised, rope_tables
from parallel.comm import LOCAL, Comm


class Output(NamedTuple):
    """Result of a forward pass over N tokens a row.

    Under `jit` a field that nobody reads is not computed, the logits included.

    Attributes:
        logits_BNV: float32.
        hidden_BNID: what feature drafters read: the I - 1 taps of the model, see `Transformer`, and
            last the output of the final norm.
        tree_kv: K/V of the N tokens, one entry a layer.
    """

    logits_BNV: jax.Array
    hidden_BNID: jax.Array
    tree_kv: tuple[LayerKV, ...]

    @property
    def final_BND(self) -> jax.Array:
        """The output of the final norm."""
        return self.hidden_BNID[..., -1, :]


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, make: Maker):
        self.attention_norm = RMSNorm(make, config.norm_eps)
        self.attention = Attention(config, make)
        self.mlp_norm = RMSNorm(make, config.norm_eps)
        self.mlp = MLP(config, make)

    def __call__(
        self,
        x_BND: jax.Array,
        ctx: Context,
        cached: tuple[jax.Array, jax.Array],
        earlier: LayerKV | None,
        comm: Comm,
    ) -> tuple[jax.Array, LayerKV]:
        """See `Attention.__call__`, whose arguments these are."""
        mixed, kv = self.attention(self.attention_norm(x_BND), ctx, cached, earlier, comm)
        x_BND += mixed
        return x_BND + self.mlp(self.mlp_norm(x_BND), comm), kv


class Transformer(nnx.Module):
    """A LLaMA-family decoder.

    It is a pytree (weights are the leaves): pass it to jitted functions as an argument, never
    close over it. Decoding uses these unstacked blocks, each layer with its own arrays.

    Attributes:
        config: its sizes and constants.
        kernel: implementation of tree attention, see `pallas_kernels.tree_attention`; None, the
            default, for the platform's own. Set it to build for a GPU that is not here, or to
            compare.
        taps: blocks whose output is handed out as well, ascending; () by default. Set it to what
            the feature drafter was trained on, see `models.feature`.
    """

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32
    ):
        make = maker(config, rngs, dtype)
        self.config = config
        self.kernel: Implementation | None = None
        self.taps: tuple[int, ...] = ()
        self.embed_VD = make("VD", config.d_model)
        self.blocks = nnx.List([Block(config, make) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(make, config.norm_eps)
        self.head_DU = None if config.tied_embeddings else make("DU", config.d_model)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return self.embed_VD[...].dtype

    def embed(self, token_BN: jax.Array, comm: Comm = LOCAL) -> jax.Array:
        """[B, N] int32 -> [B, N, D]."""
        return comm.lookup(self.embed_VD[...], token_BN)

    def head(self, hidden_BND: jax.Array, comm: Comm = LOCAL) -> jax.Array:
        """Final-norm output [B, N, D] -> float32 logits [B, N, U], U = V but in some drafters."""
        tied = self.head_DU is None
        table = self.embed_VD if self.head_DU is None else self.head_DU
        return head_logits(comm.whole_sequence(hidden_BND), table[...], tied)

    def __call__(
        self,
        token_BN: jax.Array,
        position_BN: jax.Array,
        mask_BNM: jax.Array,
        cache: KVCache | None = None,
        earlier: Sequence[LayerKV] | None = None,
        comm: Comm = LOCAL,
    ) -> Output:
        """Runs N tokens a row, which see the cached prefix and each other through the mask.

        Training: no cache, lower-triangular mask. Prefill: a chunk of the prompt behind the
        cached part, the same mask. Verification: the nodes of a token tree, ancestor mask. The
        cache is not written; see `kv_cache.commit`.

        Args:
            token_BN: int32.
            position_BN: int32, absolute; for a tree cache length + depth, never the slot index
                (SpecInfer section 4.2).
            mask_BNM: bool, which of the M = (nodes in `earlier`) + N tree tokens each query sees.
            cache: committed prefix, or None.
            earlier: K/V of tree tokens of earlier passes, one entry a layer, or None.
            comm: communication.

        Raises:
            ValueError: if the shapes do not fit each other (from the attention kernel).
        """
        x_BND = self.embed(token_BN, comm)
        if cache is None:
            cache = KVCache.empty(self.config, token_BN.shape[0], 0, x_BND.dtype)
        return self.run(x_BND, position_BN, mask_BNM, cache, earlier, comm)

    def run(
        self,
        x_BND: jax.Array,
        position_BN: jax.Array,
        mask_BNM: jax.Array,
        cache: KVCache,
        earlier: Sequence[LayerKV] | None,
        comm: Comm,
    ) -> Output:
        """All that follows the embedding, for models that embed more than tokens."""
        tables = rope_tables(self.config, position_BN, x_BND.dtype)
        ctx = Context(*tables, mask_BNM, cache.length_B, self.kernel)
        tree_kv, tapped = [], []
        for i, block in enumerate(self.blocks):
            cached = (cache.k_BKSA[i], cache.v_BKSA[i])
            before = None if earlier is None else earlier[i]
            x_BND, kv = _run_block(block, x_BND, ctx, cached, before, comm)
            tree_kv.append(kv)
            if i in self.taps:
                tapped.append(normalised(x_BND, self.config.norm_eps))
        final_BND = self.final_norm(x_BND)
        hidden_BNID = jnp.stack((*tapped, final_BND), axis=-2)
        return Output(self.head(final_BND, comm), hidden_BNID, tuple(tree_kv))


@functools.partial(jax.jit, static_argnames="comm", inline=True)
def _run_block(
    block: Block,
    x_BND: jax.Array,
    ctx: Context,
    cached: tuple[jax.Array, jax.Array],
    earlier: LayerKV | None,
    comm: Comm,
) -> tuple[jax.Array, LayerKV]:
    """Calls a block. Blocks are alike, so Python runs once for all of them; XLA sees no call."""
    return block(x_BND, ctx, cached, earlier, comm)


def causal_mask(batch: int, length: int) -> jax.Array:
    """Returns the ancestor mask of a chain: bool [B, T, T], lower triangular."""
    mask = jnp.tril(jnp.ones((length, length), jnp.bool_))
    return jnp.broadcast_to(mask, (batch, length, length))
