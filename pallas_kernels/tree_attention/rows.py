"""What both kernels see: the queries of the heads that share a kv head, as rows of one matrix."""

import jax

HEAD_SIZES = (64, 80, 96, 128, 256)


def to_rows(q_BNHA: jax.Array, kv_heads: int) -> jax.Array:
    """Returns [B, K, N * G, A]: row n * G + g, so that the heads of a node lie together."""
    B, N, H, A = q_BNHA.shape
    G = H // kv_heads
    q_BNKGA = q_BNHA.reshape(B, N, kv_heads, G, A)
    return q_BNKGA.transpose(0, 2, 1, 3, 4).reshape(B, kv_heads, N * G, A)
