"""How a drafter's distribution becomes children: four ways, each with the draws that it makes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec.draws import Children, Kind
from spec.sampling import draw, fold


class Chosen(NamedTuple):
    """Children of n nodes, k each, in trial order.

    Attributes:
        token_Bnk: int32.
        kind_k: how each was drawn.
        q_BnV: the distribution that the random ones were drawn from.
        some_Bnk: bool, False where q had nothing left to draw.
    """

    token_Bnk: jax.Array
    kind_k: tuple[Kind, ...]
    q_BnV: jax.Array
    some_Bnk: jax.Array


def choose(children: Children, q_BnV: jax.Array, width: int, key_B: jax.Array) -> Chosen:
    """Chooses `width` children of each node.

    Args:
        children: TOP_K, IID, WITHOUT_REPLACEMENT or GREEDY_PLUS_ONE.
        q_BnV: the drafter's processed distribution after each node.
        width: k.
        key_B: a key a row; nodes and draws are folded in.

    Raises:
        ValueError: for another way, which no drafter here takes.
    """
    n = q_BnV.shape[1]
    if children is Children.TOP_K:
        best_Bnk = _top(q_BnV, width)
        return Chosen(best_Bnk, (Kind.POINT_MASS,) * width, q_BnV, best_Bnk >= 0)
    if children is Children.IID:
        token_Bnk = jnp.stack(
            [
                jnp.stack([draw(fold(key_B, i, k), q_BnV[:, i]) for k in range(width)], axis=1)
                for i in range(n)
            ],
            axis=1,
        )
        return Chosen(token_Bnk, (Kind.IID,) * width, q_BnV, token_Bnk >= 0)
    if children is Children.WITHOUT_REPLACEMENT:
        # Gumbel top-k: the order of perturbed log-probabilities is that of successive draws.
        noise = [
            jax.vmap(lambda key: jax.random.gumbel(key, q_BnV.shape[2:], q_BnV.dtype))(
                fold(key_B, i)
            )
            for i in range(n)
        ]
        score_BnV = jnp.log(q_BnV) + jnp.stack(noise, axis=1)
        best_Bnk, token_Bnk = jax.lax.top_k(score_BnV, width)
        kinds = (Kind.WITHOUT_REPLACEMENT,) * width
        return Chosen(token_Bnk.astype(jnp.int32), kinds, q_BnV, best_Bnk > -jnp.inf)
    if children is Children.GREEDY_PLUS_ONE:
        fixed_Bnk = _top(q_BnV, width - 1)
        index_V = jnp.arange(q_BnV.shape[2], dtype=jnp.int32)
        held_BnV = jnp.any(fixed_Bnk[..., None] == index_V[None, None, None, :], axis=2)
        left_BnV = jnp.where(held_BnV, 0, q_BnV)
        total_Bn1 = left_BnV.sum(-1, keepdims=True)
        left_BnV = left_BnV / jnp.where(total_Bn1 > 0, total_Bn1, 1)
        one_Bn = jnp.stack([draw(fold(key_B, i), left_BnV[:, i]) for i in range(n)], axis=1)
        token_Bnk = jnp.concatenate([one_Bn[..., None], fixed_Bnk], axis=2)
        some_Bnk = jnp.concatenate([total_Bn1 > 0, fixed_Bnk >= 0], axis=2)
        kinds = (Kind.IID, *[Kind.POINT_MASS] * (width - 1))
        return Chosen(token_Bnk, kinds, left_BnV, some_Bnk)
    raise ValueError(f"No drafter chooses {children.value!r} children.")


def _top(q_BnV: jax.Array, width: int) -> jax.Array:
    return jax.lax.top_k(q_BnV, width)[1].astype(jnp.int32)
