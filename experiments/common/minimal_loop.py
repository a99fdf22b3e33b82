"""The least that greedy decoding needs, by hand: the baseline that plain decoding is held to.

One prompt, one jitted while_loop, raw arrays, no batch axis, no trees, no budget per row. It reads
the same weights as `Transformer` and stops at end-of-sequence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.layers import rope_frequencies
from models.transformer import Transformer


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale[None]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def forward(
    model: Transformer, token_T: jax.Array, at: jax.Array, ks: list, vs: list
) -> tuple[jax.Array, list, list]:
    """Runs T tokens at positions at.. and writes them to the caches [K, S, A]; returns hidden."""
    c = model.config
    T, G = token_T.shape[0], c.num_heads // c.num_kv_heads
    x = model.embed_VD[...][token_T]
    position = at + jnp.arange(T, dtype=jnp.int32)
    phase = position.astype(jnp.float32)[:, None] * rope_frequencies(c)[None]
    cos, sin = jnp.cos(phase)[:, None], jnp.sin(phase)[:, None]
    S = ks[0].shape[1]
    seen = jnp.arange(S, dtype=jnp.int32)[None, :] <= position[:, None]
    ks, vs = list(ks), list(vs)
    for i, block in enumerate(model.blocks):
        attn = block.attention
        h = _norm(x, block.attention_norm.scale_D[...], c.norm_eps)
        q = _rotate(jnp.tensordot(h, attn.q_DHA[...], 1), cos, sin)
        k = _rotate(jnp.tensordot(h, attn.k_DKA[...], 1), cos, sin)
        v = jnp.tensordot(h, attn.v_DKA[...], 1)
        ks[i] = jax.lax.dynamic_update_slice(ks[i], k.swapaxes(0, 1), (0, at, 0))
        vs[i] = jax.lax.dynamic_update_slice(vs[i], v.swapaxes(0, 1), (0, at, 0))
        q = q.reshape(T, c.num_kv_heads, G, c.head_dim)
        score = jnp.einsum("tkga,ksa->kgts", q, ks[i]) * c.head_dim**-0.5
        weight = jax.nn.softmax(jnp.where(seen[None, None], score, -jnp.inf), axis=-1)
        mixed = jnp.einsum("kgts,ksa->tkga", weight, vs[i]).reshape(T, c.num_heads, c.head_dim)
        x = x + jnp.tensordot(mixed, attn.o_HAD[...], 2)
        h = _norm(x, block.mlp_norm.scale_D[...], c.norm_eps)
        gated = jax.nn.silu(h @ block.mlp.gate_DF[...]) * (h @ block.mlp.up_DF[...])
        x = x + gated @ block.mlp.down_FD[...]
    return _norm(x, model.final_norm.scale_D[...], c.norm_eps), ks, vs


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "slots"))
def _decode(
    model: Transformer, prompt_T: jax.Array, eos: jax.Array, max_new_tokens: int, slots: int
) -> tuple[jax.Array, jax.Array]:
    c = model.config
    empty = jnp.zeros((c.num_kv_heads, slots, c.head_dim), model.dtype)
    ks, vs = [empty] * c.num_layers, [empty] * c.num_layers
    _, ks, vs = forward(model, prompt_T[:-1], jnp.int32(0), ks, vs)
    out = jnp.zeros(max_new_tokens, jnp.int32)

    def more(carry: tuple) -> jax.Array:
        n, token, *_ = carry
        return (n < max_new_tokens) & ((n == 0) | (token != eos))

    def body(carry: tuple) -> tuple:
        n, token, out, ks, vs = carry
        hidden, ks, vs = forward(model, token[None], prompt_T.shape[0] - 1 + n, ks, vs)
        logits = model.head(hidden[None])[0, 0]
        token = jax.lax.top_k(logits, 1)[1][0].astype(jnp.int32)
        return n + 1, token, out.at[n].set(token), ks, vs

    n, _, out, *_ = jax.lax.while_loop(more, body, (jnp.int32(0), prompt_T[-1], out, ks, vs))
    return n, out


def decode(
    model: Transformer, prompt: list[int], eos: int, max_new_tokens: int, slots: int
) -> list[int]:
    """Continues one prompt greedily.

    Args:
        model: a model without attention bias.
        prompt: at least 2 token ids.
        eos: id that ends the text, -1 for none.
        max_new_tokens: most tokens.
        slots: cache slots, at least prompt + max_new_tokens.
    """
    n, out = _decode(model, jnp.asarray(prompt, jnp.int32), np.int32(eos), max_new_tokens, slots)
    return np.asarray(out)[: int(n)].tolist()
