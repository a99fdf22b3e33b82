"""A matrix product and the collective beside it, as one: plain, in chunks, or around a ring.

Tensor parallelism with a split sequence gathers tokens before a column product and sums partial
results after a row product, on the critical path (Korthikanti et al. 2022, arXiv 2205.05198). Cut
into pieces, a piece is on its way while another is multiplied (Wang et al., ASPLOS 2023; the
workload dimension of Centauri). Four ways under one signature:

* plain: one collective, one product.
* tokens: k collectives, each of some of every device's tokens, beside the product of others.
* features: k collectives, each of a part of the features: those that a column product contracts
  (its partial products are added), those that a row product gives.
* ring: as many permutations as there are other devices, a product for each shard that passes.

The backward pass is planned too: the gradient of the input comes first, since the layer before
waits for it; the gradient of the weights fills the gaps.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from parallel.collectives import cut
from parallel.comm import contract


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How a product and its collective are carried out; its text is "plain", "tokens/4", "ring".

    Attributes:
        kind: see the module.
        chunks: pieces; more than 1 for "tokens" and "features" only.
    """

    kind: Literal["plain", "tokens", "features", "ring"]
    chunks: int = 1

    def __post_init__(self) -> None:
        """Refuses unknown ways, and chunks where there are none."""
        if self.kind not in ("plain", "tokens", "features", "ring"):
            raise ValueError(f"Overlap {self.kind!r}: choose plain, tokens, features or ring.")
        if (self.chunks > 1) != (self.kind in ("tokens", "features")):
            raise ValueError(
                f"Overlap {self.kind} in {self.chunks} chunks: tokens and features take 2 or more, "
                "the others 1."
            )

    def __str__(self) -> str:
        return f"{self.kind}/{self.chunks}" if self.chunks > 1 else self.kind

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` wrote.

        Raises:
            ValueError: for anything else.
        """
        found = re.fullmatch(r"(\w+)(?:/(\d+))?", text)
        if found is None:
            raise ValueError(f"Overlap {text!r}: write plain, tokens/4, features/4 or ring.")
        return cls(found[1], int(found[2] or 1))  # type: ignore[arg-type]


PLAIN = Overlap("plain")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gather_matmul(
    x: jax.Array, weights: tuple[jax.Array, ...], name: str, how: Overlap
) -> tuple[jax.Array, ...]:
    """Gathers tokens and multiplies them with this device's part of some weights.

    Args:
        x: this device's tokens, [B, t, D].
        weights: each [D, *out].
        name: mesh axis over which the tokens are split.
        how: see `Overlap`.

    Returns:
        For each weight [B, T, *out], T = t times the devices.
    """
    return _gathered(x, weights, name, how)


def _gather_forward(
    x: jax.Array, weights: tuple[jax.Array, ...], name: str, how: Overlap
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, tuple[jax.Array, ...]]]:
    # The gathered tokens are not kept: a group of g devices would hold them g times.
    return gather_matmul(x, weights, name, how), (x, weights)


def _gather_backward(
    name: str,
    how: Overlap,
    kept: tuple[jax.Array, tuple[jax.Array, ...]],
    dy: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, weights = kept

    turned = [(each, _turned(w, 1)) for each, w in zip(dy, weights, strict=True)]
    dx = _scattered(turned, name, how)
    (whole,) = _gathered(x, [None], name, how)
    return dx, tuple(_outer(whole, each) for each in dy)


gather_matmul.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_scatter(h: jax.Array, w: jax.Array, name: str, how: Overlap) -> jax.Array:
    """Multiplies with this device's part of a weight, sums over devices, keeps its own tokens.

    Args:
        h: [B, T, *in], this device's part of the features.
        w: [*in, D].
        name: mesh axis over which features were, and tokens will be, split.
        how: see `Overlap`.

    Returns:
        [B, t, D], t = T divided by the devices.

    Raises:
        ValueError: if T does not divide.
    """
    return _scattered([(h, w)], name, how)


def _scatter_forward(
    h: jax.Array, w: jax.Array, name: str, how: Overlap
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul_scatter(h, w, name, how), (h, w)


def _scatter_backward(
    name: str, how: Overlap, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    h, w = kept
    # One round of communication serves both gradients.
    dh, whole = _gathered(dy, [_turned(w, w.ndim - 1), None], name, how)
    return dh, _outer(h, whole)


matmul_scatter.defvjp(_scatter_forward, _scatter_backward)


def _turned(w: jax.Array, inputs: int) -> jax.Array:
    """Puts the last axes first: the weight of the product that goes back."""
    return w.transpose(*range(inputs, w.ndim), *range(inputs))


def _outer(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns the gradient of a weight: x [B, T, *in], dy [B, T, *out] -> [*in, *out]."""
    rows = x.shape[0] * x.shape[1]
    flat = contract(x.reshape(rows, -1).T, dy.reshape(rows, -1), 1)
    return flat.reshape(*x.shape[2:], *dy.shape[2:])


def _gathered(
    x: jax.Array, weights: Sequence[jax.Array | None], name: str, how: Overlap
) -> tuple[jax.Array, ...]:
    """Multiplies the tokens of all devices, in their order, with weights (None: as they are)."""
    g = lax.axis_size(name)
    if how.kind == "ring":
        me, shard, found = lax.axis_index(name), x, []
        ring = [(i, (i + 1) % g) for i in range(g)]
        for step in range(g):
            passed = lax.ppermute(shard, name, ring) if step < g - 1 else shard
            found.append([_times(shard, w) for w in weights])
            shard = passed
        # Shard i was here in step (me - i) mod g.
        order = (me - jnp.arange(g, dtype=jnp.int32)) % g
        stacked = [jnp.stack(each, axis=1)[:, order] for each in zip(*found, strict=True)]
        return tuple(_joined(each) for each in stacked)
    if how.kind == "features":
        parts = cut(x, how.chunks, 2)
        rows = [cut(w, how.chunks, 0) if w is not None else [None] * len(parts) for w in weights]
        wholes = [lax.all_gather(part, name, axis=1, tiled=True) for part in parts]
        products = [
            [_times(whole, w) for whole, w in zip(wholes, mine, strict=True)] for mine in rows
        ]
        return tuple(
            jnp.concatenate(each, 2) if w is None else functools.reduce(jnp.add, each)
            for w, each in zip(weights, products, strict=True)
        )
    pieces = []
    for part in cut(x, how.chunks, 1):
        whole = lax.all_gather(part, name, axis=1, tiled=True)
        outs = [_times(whole, w) for w in weights]
        pieces.append([out.reshape(out.shape[0], g, -1, *out.shape[2:]) for out in outs])
    return tuple(_joined(jnp.concatenate(each, 2)) for each in zip(*pieces, strict=True))


def _times(x: jax.Array, w: jax.Array | None) -> jax.Array:
    return x if w is None else contract(x, w, 1)


def _joined(by_shard: jax.Array) -> jax.Array:
    """[B, g, t, ...] -> [B, g * t, ...]."""
    return by_shard.reshape(by_shard.shape[0], -1, *by_shard.shape[3:])


def _scattered(pairs: Sequence[tuple[jax.Array, jax.Array]], name: str, how: Overlap) -> jax.Array:
    """Adds the products of inputs [B, T, *in] and weights [*in, D] over devices; own tokens."""
    g, T = lax.axis_size(name), pairs[0][0].shape[1]
    if T % g:
        raise ValueError(
            f"{T} tokens do not divide among the {g} devices of {name!r}: change the length."
        )

    def product(inputs: Sequence[jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
        parts = [contract(x, w, w.ndim - 1) for x, w in zip(inputs, weights, strict=True)]
        return functools.reduce(jnp.add, parts)

    def scatter(out: jax.Array) -> jax.Array:
        return lax.psum_scatter(out, name, scatter_dimension=1, tiled=True)

    inputs, weights = ([*each] for each in zip(*pairs, strict=True))
    if how.kind == "features":
        columns = zip(*(cut(w, how.chunks, w.ndim - 1) for w in weights), strict=True)
        return jnp.concatenate([scatter(product(inputs, part)) for part in columns], axis=2)
    by_shard = [x.reshape(x.shape[0], g, T // g, *x.shape[2:]) for x in inputs]
    if how.kind == "ring":
        me = lax.axis_index(name)
        ring = [(i, (i + 1) % g) for i in range(g)]

        def partial(shard: jax.Array) -> jax.Array:
            return product([x[:, shard] for x in by_shard], weights)

        total = partial((me - 1) % g)
        for step in range(1, g):
            total = lax.ppermute(total, name, ring) + partial((me - 1 - step) % g)
        return total
    pieces = zip(*(cut(x, how.chunks, 2) for x in by_shard), strict=True)
    return jnp.concatenate(
        [scatter(product([_joined(x) for x in part], weights)) for part in pieces], axis=1
    )
