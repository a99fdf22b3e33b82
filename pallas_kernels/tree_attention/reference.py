"""The plain version: two score blocks, one softmax. Every kernel is held against it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def tree_attention(
    q_BNHA: jax.Array,
    k_BKSA: jax.Array,
    v_BKSA: jax.Array,
    length_B: jax.Array,
    tree_k_BMKA: jax.Array,
    tree_v_BMKA: jax.Array,
    mask_BNM: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.tree_attention`, which checks the arguments.

    Scores and the softmax are float32 or wider whatever the inputs are. Masking selects instead of
    adding or multiplying, so that NaN in unused cache slots cannot leak. The gradient is finite
    for queries that see nothing, too.

    Args:
        q_BNHA: queries.
        k_BKSA: cached keys.
        v_BKSA: cached values.
        length_B: int32, cached tokens of each row.
        tree_k_BMKA: keys of tree nodes.
        tree_v_BMKA: values of tree nodes.
        mask_BNM: bool.

    Returns:
        The output [B, N, H, A] and the log-sum-exp of the scores [B, N, H].
    """
    B, N, H, A = q_BNHA.shape
    K, S = k_BKSA.shape[1:3]
    precision = lax.Precision.HIGHEST if q_BNHA.dtype.itemsize >= 4 else lax.Precision.DEFAULT
    wide = np.promote_types(q_BNHA.dtype, jnp.float32)
    # Widened first: XLA:CPU cannot multiply bfloat16 into float32 with two batch axes, and the
    # products are exact either way.
    q_BNKGA = q_BNHA.reshape(B, N, K, H // K, A).astype(wide)

    def score(equation: str, k: jax.Array, visible: jax.Array) -> jax.Array:
        s = jnp.einsum(equation, q_BNKGA, k.astype(wide), precision=precision)
        return jnp.where(jnp.broadcast_to(visible, s.shape), s * A**-0.5, -jnp.inf)

    cached_BS = jnp.arange(S, dtype=jnp.int32)[None, :] < length_B[:, None]
    prefix_BKGNS = score("BNKGA,BKSA->BKGNS", k_BKSA, cached_BS[:, None, None, None, :])
    tree_BKGNM = score("BNKGA,BMKA->BKGNM", tree_k_BMKA, mask_BNM[:, None, None, :, :])

    # One softmax over both blocks; a finite maximum keeps exp(-inf - max) = 0 for blind queries.
    top = jnp.max(tree_BKGNM, axis=-1, keepdims=True)
    if S:
        top = jnp.maximum(top, jnp.max(prefix_BKGNS, axis=-1, keepdims=True))
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, jnp.zeros_like(top), top))
    prefix_BKGNS, tree_BKGNM = jnp.exp(prefix_BKGNS - top), jnp.exp(tree_BKGNM - top)
    total_BKGN1 = prefix_BKGNS.sum(-1, keepdims=True) + tree_BKGNM.sum(-1, keepdims=True)
    safe_BKGN1 = jnp.where(total_BKGN1 == 0, jnp.ones_like(total_BKGN1), total_BKGN1)
    scale = 1 / safe_BKGN1
    lse_BKGN1 = jnp.where(total_BKGN1 == 0, -jnp.inf, top + jnp.log(safe_BKGN1))

    def mix(equation: str, weight: jax.Array, v: jax.Array) -> jax.Array:
        weight = (weight * scale).astype(v.dtype)
        return jnp.einsum(equation, weight.astype(wide), v.astype(wide), precision=precision)

    # Unused slots may hold anything, NaN included, and 0 * NaN is NaN.
    seen = cached_BS[:, None, :, None]
    v_BKSA = jnp.where(jnp.broadcast_to(seen, v_BKSA.shape), v_BKSA, jnp.zeros_like(v_BKSA))
    out_BNKGA = mix("BKGNS,BKSA->BNKGA", prefix_BKGNS, v_BKSA)
    out_BNKGA += mix("BKGNM,BMKA->BNKGA", tree_BKGNM, tree_v_BMKA)
    lse_BNH = lse_BKGN1[..., 0].transpose(0, 3, 1, 2).reshape(B, N, H)
    return out_BNKGA.reshape(B, N, H, A).astype(q_BNHA.dtype), lse_BNH.astype(jnp.float32)


def gather_pages(pages_PKSA: jax.Array, table_BX: jax.Array) -> jax.Array:
    """Returns each row's pages side by side: [B, K, X * S, A]."""
    rows_BXKSA = pages_PKSA[table_BX]
    B, X, K, S, A = rows_BXKSA.shape
    return rows_BXKSA.swapaxes(1, 2).reshape(B, K, X * S, A)
