"""XLA again, but the prefix is walked block by block, as far as the longest row reaches.

The reference scores every slot of the cache and masks what holds nothing, so that its cost follows
the capacity. Here a loop runs over blocks of slots and ends with the last cached token; a running
maximum and sum make one softmax of them (online softmax, Milakov and Gimelshein 2018, arXiv
1805.02867; FlashAttention, Dao et al. 2022, arXiv 2205.14135). No gradient: the number of blocks is
known at run time only.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.tree_attention.reference import gather_pages

# Slots scored at a time. Measured on 2 cores, 9 heads of 64: 16 queries are fastest in short
# blocks, which end sooner behind the last token; 128 queries over 4,096 slots take 17.6 ms in
# blocks of 128 and 11.2 ms in blocks of 512, whose products are large enough for two threads.
FEW, BLOCK, WIDE_BLOCK = 32, 128, 512

# Running maximum [B, K, G, N, 1], sum of weights likewise, and weighted values [B, K, G, N, A].
_Carry = tuple[jax.Array, jax.Array, jax.Array]


def tree_attention(
    q_BNHA: jax.Array,
    k_PKSA: jax.Array,
    v_PKSA: jax.Array,
    length_B: jax.Array,
    tree_k_BMKA: jax.Array,
    tree_v_BMKA: jax.Array,
    mask_BNM: jax.Array,
    table_BX: jax.Array,
    *,
    dense: bool,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.tree_attention`, which checks the arguments.

    Scores, softmax and sums are float32 or wider whatever the inputs are, as in the reference.

    Args:
        q_BNHA: queries.
        k_PKSA: cached keys.
        v_PKSA: cached values.
        length_B: int32, cached tokens of each row.
        tree_k_BMKA: keys of tree nodes.
        tree_v_BMKA: values of tree nodes.
        mask_BNM: bool.
        table_BX: int32, pages of each row.
        dense: the pages are the rows, whatever the table says.
        block: most slots scored at a time, but a page at least; None for what suits N queries.

    Returns:
        The output [B, N, H, A] and the log-sum-exp of the scores [B, N, H].
    """
    B, N, H, A = q_BNHA.shape
    K, page = k_PKSA.shape[1:3]
    precision = lax.Precision.HIGHEST if q_BNHA.dtype.itemsize >= 4 else lax.Precision.DEFAULT
    wide = np.promote_types(q_BNHA.dtype, jnp.float32)
    if block is None:
        block = BLOCK if N <= FEW else WIDE_BLOCK
    # Each kv head's queries side by side: one product a head and block.
    q_BKGNA = q_BNHA.reshape(B, N, K, H // K, A).transpose(0, 2, 3, 1, 4).astype(wide) * A**-0.5

    def absorb(carry: _Carry, k_BKSA: jax.Array, v_BKSA: jax.Array, seen: jax.Array) -> _Carry:
        """Adds S more keys and values, of which each query sees `seen`."""
        top, total, out = carry
        s = jnp.einsum("BKGNA,BKSA->BKGNS", q_BKGNA, k_BKSA.astype(wide), precision=precision)
        s = jnp.where(jnp.broadcast_to(seen, s.shape), s, -jnp.inf)
        higher = jnp.maximum(top, s.max(-1, keepdims=True))
        # A finite one keeps exp(-inf - maximum) = 0 where nothing is seen yet.
        finite = jnp.where(higher == -jnp.inf, jnp.zeros_like(higher), higher)
        weight, kept = jnp.exp(s - finite), jnp.exp(top - finite)
        mixed = jnp.einsum("BKGNS,BKSA->BKGNA", weight, v_BKSA.astype(wide), precision=precision)
        return higher, total * kept + weight.sum(-1, keepdims=True), out * kept + mixed

    nothing = jnp.zeros((*q_BKGNA.shape[:4], 1), wide)
    carry = absorb(
        (jnp.full_like(nothing, -jnp.inf), nothing, jnp.zeros_like(q_BKGNA)),
        tree_k_BMKA.swapaxes(1, 2),
        tree_v_BMKA.swapaxes(1, 2),
        mask_BNM[:, None, None, :, :],
    )

    # A block is some slots of a row, or some whole pages.
    unit, units = (1, page) if dense else (page, table_BX.shape[1])
    width = min(units, max(1, block // max(1, unit)))

    def body(i: jax.Array, carry: _Carry) -> _Carry:
        # The last block begins earlier if it would stand out; what it repeats is not seen twice.
        start = jnp.minimum(i * width, units - width)
        if dense:
            k_BKSA, v_BKSA = (
                lax.dynamic_slice_in_dim(a, start, width, 2) for a in (k_PKSA, v_PKSA)
            )
        else:
            table = lax.dynamic_slice_in_dim(table_BX, start, width, 1)
            k_BKSA, v_BKSA = gather_pages(k_PKSA, table), gather_pages(v_PKSA, table)
        slot_S = start * unit + jnp.arange(width * unit, dtype=jnp.int32)
        seen_BS = (slot_S >= i * width * unit)[None, :] & (slot_S[None, :] < length_B[:, None])
        # Unused slots may hold anything, NaN included, and 0 * NaN is NaN.
        clean = jnp.broadcast_to(seen_BS[:, None, :, None], v_BKSA.shape)
        v_BKSA = jnp.where(clean, v_BKSA, jnp.zeros_like(v_BKSA))
        return absorb(carry, k_BKSA, v_BKSA, seen_BS[:, None, None, None, :])

    if units * unit:
        blocks = lax.div(jnp.max(length_B) + (width * unit - 1), width * unit)
        carry = lax.fori_loop(0, blocks, body, carry)
    top, total, out_BKGNA = carry
    safe = jnp.where(total == 0, jnp.ones_like(total), total)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    out_BNHA = (out_BKGNA / safe).transpose(0, 3, 1, 2, 4).reshape(B, N, H, A)
    lse_BNH = lse[..., 0].transpose(0, 3, 1, 2).reshape(B, N, H)
    return out_BNHA.astype(q_BNHA.dtype), lse_BNH.astype(jnp.float32)
