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
) -> jax.Array:
    """Attends from N tree nodes to a cached prefix and to the M nodes of the tree so far.

    Equals ordinary causal attention along every root-to-node path (tree attention, SpecInfer
    definition 4.1) when `mask_BNM` is the ancestor mask. One function serves four callers:
    M = N a tree under verification or (mask lower triangular) a chunk of a prompt; N = 1 plain
    decoding; S = 0 training; M > N a tree grown level by level, the queries being its last level.

    Scores and the softmax are float32 whatever the inputs are. Masking selects instead of adding
    or multiplying, so that NaN in unused cache slots cannot leak. A query that may see nothing
    gives zeros, with a finite gradient.

    Args:
        q_BNHA: queries, already rotated; H = K * G query heads, head h reads kv head h // G.
        k_BKSA: cached keys, slots >= length_B unread.
        v_BKSA: cached values.
        length_B: int32, number of cached tokens of each row, 0..S.
        tree_k_BMKA: keys of the tree nodes.
        tree_v_BMKA: values of the tree nodes.
        mask_BNM: bool, True where query n may see tree node m.

    Returns:
        [B, N, H, A] in the dtype of `q_BNHA`. Unit: as the values.

    Raises:
        ValueError: if H is not a multiple of K or the arrays do not fit each other.
    """
    _check(q_BNHA, k_BKSA, v_BKSA, tree_k_BMKA, tree_v_BMKA, mask_BNM)
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
    scale = 1 / jnp.where(total_BKGN1 == 0, jnp.ones_like(total_BKGN1), total_BKGN1)

    def mix(equation: str, weight: jax.Array, v: jax.Array) -> jax.Array:
        weight = (weight * scale).astype(v.dtype)
        return jnp.einsum(equation, weight.astype(wide), v.astype(wide), precision=precision)

    # Unused slots may hold anything, NaN included, and 0 * NaN is NaN.
    seen = cached_BS[:, None, :, None]
    v_BKSA = jnp.where(jnp.broadcast_to(seen, v_BKSA.shape), v_BKSA, jnp.zeros_like(v_BKSA))
    out_BNKGA = mix("BKGNS,BKSA->BNKGA", prefix_BKGNS, v_BKSA)
    out_BNKGA += mix("BKGNM,BMKA->BNKGA", tree_BKGNM, tree_v_BMKA)
    return out_BNKGA.reshape(B, N, H, A).astype(q_BNHA.dtype)


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_k: jax.Array, tree_v: jax.Array, mask: jax.Array
) -> None:
    B, N, H, A = q.shape
    K, S = k.shape[1:3]
    M = tree_k.shape[1]
    if H % K:
        raise ValueError(
            f"{H} query heads do not divide into {K} key/value heads: give a multiple of {K}."
        )
    wanted = {
        "k_BKSA": (k, (B, K, S, A)),
        "v_BKSA": (v, (B, K, S, A)),
        "tree_k_BMKA": (tree_k, (B, M, K, A)),
        "tree_v_BMKA": (tree_v, (B, M, K, A)),
        "mask_BNM": (mask, (B, N, M)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, wanted {shape} for queries {q.shape}."
            )
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask_BNM has dtype {mask.dtype}, wanted bool.")
