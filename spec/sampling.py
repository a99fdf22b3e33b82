"""From logits to the distribution that is sampled, and draws from it.

Target and drafter pass through the same `probabilities`, so that the p and the q of a
verification are exactly the distributions that tokens were drawn from. "Exactly" ends at the
resolution of a float32 random number: probabilities below about 2^-23 are rounded to its steps.
"""

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Below this temperature a row is greedy, everywhere: p is one-hot on the best token.
GREEDY_BELOW = 1e-4
# Entries summed exactly before the blocks are: keeps float32 cumulative sums accurate and quick.
_BLOCK = 256
_BEST_BLOCK = 128


class Use(enum.IntEnum):
    """What a random key is for; folded in, so that no two uses share a stream."""

    TOKEN = 0  # y ~ p, by the absolute position of y
    DRAFT = 1
    ORDER = 2
    ACCEPT = 3
    BONUS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Controls of each row, applied in this order: temperature, top-k, top-p.

    Attributes:
        temperature_B: float32; below `GREEDY_BELOW` the row is greedy whatever the rest says.
        top_k_B: int32, most tokens kept; 0 keeps all.
        top_p_B: float32 in (0, 1], least probability kept; the smallest set of most probable
            tokens that reaches it, with all that tie with its last.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array

    @property
    def greedy_B(self) -> jax.Array:
        """Rows that take the best token."""
        return self.temperature_B < GREEDY_BELOW


def check_controls(temperature: float, top_k: int, top_p: float) -> None:
    """Refuses controls that mean nothing.

    Raises:
        ValueError: for a temperature that is negative, NaN or infinite, a negative top_k, or a
            top_p outside (0, 1].
    """
    if not (temperature >= 0 and np.isfinite(temperature)):
        raise ValueError(f"temperature = {temperature} must be finite and at least 0 (greedy).")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k} must be at least 0 (0 keeps all tokens).")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} must lie in (0, 1].")


def rows(temperature: float, top_k: int, top_p: float, batch: int) -> Sampling:
    """Returns the same controls for `batch` rows.

    Raises:
        ValueError: as `check_controls`.
    """
    check_controls(temperature, top_k, top_p)
    # Made by the host and only put there: `jnp.full` and `jnp.asarray` are a program each.
    return Sampling(
        jax.device_put(np.full(batch, temperature, np.float32)),
        jax.device_put(np.full(batch, top_k, np.int32)),
        jax.device_put(np.full(batch, top_p, np.float32)),
    )


def best_token(logits_BNV: jax.Array) -> jax.Array:
    """Returns the most probable token of each node, int32 [B, N]; the lowest id among equals.

    In two levels: the block that holds the maximum, then the place in it. On XLA:CPU at V = 49152
    a seventh of the time of `top_k` over the whole row, which is itself quicker than `argmax`.
    """
    V = logits_BNV.shape[-1]
    least = jnp.full((), -jnp.inf, logits_BNV.dtype)
    edges = [(0, 0, 0)] * (logits_BNV.ndim - 1)
    padded = jax.lax.pad(logits_BNV, least, [*edges, (0, -V % _BEST_BLOCK, 0)])
    blocks_BNXY = padded.reshape(*logits_BNV.shape[:-1], -1, _BEST_BLOCK)
    block_BN = _first_best(blocks_BNXY.max(-1))
    inside_BNY = jnp.take_along_axis(blocks_BNXY, block_BN[..., None, None], axis=-2)[..., 0, :]
    return block_BN * _BEST_BLOCK + _first_best(inside_BNY)


def _first_best(x: jax.Array) -> jax.Array:
    return jax.lax.top_k(x, 1)[1][..., 0].astype(jnp.int32)


def probabilities(logits_BNV: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the distribution that is sampled after each node, [B, N, V], float32 or wider."""
    V = logits_BNV.shape[-1]
    best_BNV = jax.nn.one_hot(best_token(logits_BNV), V, dtype=logits_BNV.dtype)
    greedy_B11 = sampling.greedy_B[:, None, None]
    # A greedy row's quotient is not used; dividing by 1 keeps it free of NaN.
    heat_B11 = jnp.where(greedy_B11, 1.0, sampling.temperature_B[:, None, None])
    p_BNV = jax.nn.softmax(logits_BNV / heat_B11.astype(logits_BNV.dtype), axis=-1)
    p_BNV = jax.lax.cond(
        jnp.any(sampling.top_k_B > 0), lambda p: _top_k(p, sampling.top_k_B), lambda p: p, p_BNV
    )
    p_BNV = jax.lax.cond(
        jnp.any(sampling.top_p_B < 1), lambda p: _top_p(p, sampling.top_p_B), lambda p: p, p_BNV
    )
    return jnp.where(greedy_B11, best_BNV, p_BNV)


def _top_k(p_BNV: jax.Array, k_B: jax.Array) -> jax.Array:
    """Keeps the k most probable tokens of each row and those that tie with the last of them."""
    wanted_BN = jnp.broadcast_to(k_B[:, None], p_BNV.shape[:2])
    cut_BN = _largest_threshold(
        p_BNV, lambda keep: jnp.sum(keep, axis=-1, dtype=jnp.int32) >= wanted_BN
    )
    return _keep(p_BNV, jnp.where(k_B[:, None] > 0, cut_BN, 0))


def _top_p(p_BNV: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Keeps the smallest set of most probable tokens whose probability reaches top-p."""
    # Of what top-k left; at top_p = 1 rounding must not cut anything.
    wanted_BN = top_p_B[:, None].astype(p_BNV.dtype) * p_BNV.sum(-1)
    cut_BN = _largest_threshold(
        p_BNV, lambda keep: jnp.sum(jnp.where(keep, p_BNV, 0), axis=-1) >= wanted_BN
    )
    return _keep(p_BNV, jnp.where(top_p_B[:, None] < 1, cut_BN, 0))


def _keep(p_BNV: jax.Array, cut_BN: jax.Array) -> jax.Array:
    kept_BNV = jnp.where(p_BNV >= cut_BN[..., None].astype(p_BNV.dtype), p_BNV, 0)
    return kept_BNV / kept_BNV.sum(-1, keepdims=True)


def _largest_threshold(p_BNV: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns per node the largest t in p for which `enough(p >= t)` holds, by bisection.

    Non-negative floats are ordered as their bit patterns are, so bisecting over the integers ends
    at the exact threshold after as many halvings as the type has bits. A full sort of V = 49152
    costs forty times as much on a CPU.
    """
    bits = jnp.int64 if p_BNV.dtype == jnp.float64 else jnp.int32
    low_BN = jnp.zeros(p_BNV.shape[:2], bits)
    high_BN = jax.lax.bitcast_convert_type(p_BNV.max(-1), bits) + 1

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_BN, high_BN = bounds
        middle_BN = low_BN + (high_BN - low_BN) // 2
        cut_BN = jax.lax.bitcast_convert_type(middle_BN, p_BNV.dtype)
        good_BN = enough(p_BNV >= cut_BN[..., None])
        return jnp.where(good_BN, middle_BN, low_BN), jnp.where(good_BN, high_BN, middle_BN)

    low_BN, _ = jax.lax.fori_loop(0, jnp.iinfo(bits).bits, halve, (low_BN, high_BN))
    return jax.lax.bitcast_convert_type(low_BN, p_BNV.dtype)


def fold(key_B: jax.Array, *data_B: jax.Array | int) -> jax.Array:
    """Folds integers into each row's key, one after the other; scalars go to every row."""
    for data in data_B:
        each_B = jnp.broadcast_to(jnp.asarray(data, jnp.uint32), key_B.shape)
        key_B = jax.vmap(jax.random.fold_in)(key_B, each_B)
    return key_B


def uniform(key_B: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Returns one number in [0, 1) a row."""
    return jax.vmap(lambda key: jax.random.uniform(key, dtype=dtype))(key_B)


def draw(key_B: jax.Array, p_BV: jax.Array) -> jax.Array:
    """Draws one token a row from p (normalised or not) with a single uniform number, int32 [B].

    Inverse of the cumulative sum, in two levels. Never returns a token of probability 0 unless
    all are.
    """
    B, V = p_BV.shape
    blocks = -(-V // _BLOCK)
    p_BXY = jnp.pad(p_BV, ((0, 0), (0, blocks * _BLOCK - V))).reshape(B, blocks, _BLOCK)
    ends_BX = jnp.cumsum(p_BXY.sum(-1), axis=1)
    target_B = uniform(key_B, p_BV.dtype) * ends_BX[:, -1]
    block_B = _first_above(ends_BX, target_B)
    take = block_B[:, None]
    before_B = jnp.take_along_axis(jnp.pad(ends_BX, ((0, 0), (1, 0))), take, axis=1)[:, 0]
    p_BY = jnp.take_along_axis(p_BXY, take[:, :, None], axis=1)[:, 0]
    inner_B = _first_above(jnp.cumsum(p_BY, axis=1), target_B - before_B)
    return block_B * _BLOCK + inner_B


def _first_above(ends_BX: jax.Array, target_B: jax.Array) -> jax.Array:
    """Returns the first index whose cumulative sum exceeds the target, else the last that grows."""
    above_BX = ends_BX > target_B[:, None]
    grows_BX = jnp.diff(ends_BX, axis=1, prepend=jnp.zeros_like(ends_BX[:, :1])) > 0
    index_X = jnp.arange(ends_BX.shape[1], dtype=jnp.int32)[None, :]
    last_B = jnp.max(jnp.where(grows_BX, index_X, 0), axis=1)
    first_B = jnp.argmax(above_BX & grows_BX, axis=1).astype(jnp.int32)
    return jnp.where((above_BX & grows_BX).any(axis=1), first_B, last_B)
