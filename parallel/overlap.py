"""A matrix product and the collective beside it, as one: plain, in chunks, or around a ring.

Tensor parallelism with a split sequence gathers tokens before a column product and sums partial
results after a row product, on the critical path (Korthikanti et al. 2022, arXiv 2205.05198). Cut
into pieces, a piece is on its way while another is multiplied (Wang et al., ASPLOS 2023; the
workload dimension of Centauri). Three ways under one signature:

* plain: one collective, one product.
* chunked: k collectives, each beside the product of the chunk before or after it.
* ring: as many permutations as there are other devices, a product for each shard that passes.

The backward pass is planned too: the gradient of the input comes first, since the layer before
waits for it; the gradient of the weights fills the gaps.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from parallel.comm import contract

# Tokens [B, t, ...] -> their products [B, t, ...].
Product = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How a product and its collective are carried out; its text is "plain", "chunked/4", "ring".

    Attributes:
        kind: see the module.
        chunks: pieces of this device's tokens; more than 1 for "chunked" only.
    """

    kind: Literal["plain", "chunked", "ring"]
    chunks: int = 1

    def __post_init__(self) -> None:
        """Refuses unknown ways, and chunks where there are none."""
        if self.kind not in ("plain", "chunked", "ring"):
            raise ValueError(f"Overlap {self.kind!r}: choose plain, chunked or ring.")
        if (self.chunks > 1) != (self.kind == "chunked"):
            raise ValueError(
                f"Overlap {self.kind} in {self.chunks} chunks: chunked takes 2 or more, others 1."
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
            raise ValueError(f"Overlap {text!r}: write plain, chunked/4 or ring.")
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
    return _gathered(x, [_by(w) for w in weights], name, how)


def _by(w: jax.Array) -> Product:
    return lambda x: contract(x, w, 1)


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

    def dx_of(*dys: jax.Array) -> jax.Array:
        pairs = zip(dys, weights, strict=True)
        parts = [contract(each, _turned(w, 1), w.ndim - 1) for each, w in pairs]
        return functools.reduce(jnp.add, parts)

    dx = _scattered(dy, dx_of, name, how)
    (whole,) = _gathered(x, [lambda x: x], name, how)
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
    return _scattered((h,), lambda h: contract(h, w, w.ndim - 1), name, how)


def _scatter_forward(
    h: jax.Array, w: jax.Array, name: str, how: Overlap
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul_scatter(h, w, name, how), (h, w)


def _scatter_backward(
    name: str, how: Overlap, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    h, w = kept
    # One round of communication serves both gradients.
    dh, whole = _gathered(dy, [_by(_turned(w, w.ndim - 1)), lambda dy: dy], name, how)
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
    x: jax.Array, products: Sequence[Product], name: str, how: Overlap
) -> tuple[jax.Array, ...]:
    """Applies token-wise products to the tokens of all devices, in order of the devices."""
    g = lax.axis_size(name)
    if how.kind == "ring":
        me, shard, found = lax.axis_index(name), x, []
        ring = [(i, (i + 1) % g) for i in range(g)]
        for step in range(g):
            passed = lax.ppermute(shard, name, ring) if step < g - 1 else shard
            found.append([product(shard) for product in products])
            shard = passed
        # Shard i was here in step (me - i) mod g.
        order = (me - jnp.arange(g, dtype=jnp.int32)) % g
        stacked = [jnp.stack(each, axis=1)[:, order] for each in zip(*found, strict=True)]
        return tuple(_joined(each) for each in stacked)
    pieces = []
    for part in jnp.array_split(x, min(how.chunks, x.shape[1]), axis=1):
        whole = lax.all_gather(part, name, axis=1, tiled=True)
        outs = [product(whole) for product in products]
        pieces.append([out.reshape(out.shape[0], g, -1, *out.shape[2:]) for out in outs])
    return tuple(_joined(jnp.concatenate(each, 2)) for each in zip(*pieces, strict=True))


def _joined(by_shard: jax.Array) -> jax.Array:
    """[B, g, t, ...] -> [B, g * t, ...]."""
    return by_shard.reshape(by_shard.shape[0], -1, *by_shard.shape[3:])


def _scattered(
    inputs: tuple[jax.Array, ...],
    product: Callable[..., jax.Array],
    name: str,
    how: Overlap,
) -> jax.Array:
    """Applies a token-wise product of several inputs, sums over devices, keeps the own shard."""
    g, T = lax.axis_size(name), inputs[0].shape[1]
    if T % g:
        raise ValueError(
            f"{T} tokens do not divide among the {g} devices of {name!r}: change the length."
        )
    by_shard = [x.reshape(x.shape[0], g, T // g, *x.shape[2:]) for x in inputs]
    if how.kind == "ring":
        me = lax.axis_index(name)
        ring = [(i, (i + 1) % g) for i in range(g)]

        def partial(shard: jax.Array) -> jax.Array:
            return product(*(x[:, shard] for x in by_shard))

        total = partial((me - 1) % g)
        for step in range(1, g):
            total = lax.ppermute(total, name, ring) + partial((me - 1 - step) % g)
        return total
    pieces = []
    chunks = min(how.chunks, T // g)
    for parts in zip(*(jnp.array_split(x, chunks, axis=2) for x in by_shard), strict=True):
        out = product(*(_joined(part) for part in parts))
        pieces.append(lax.psum_scatter(out, name, scatter_dimension=1, tiled=True))
    return jnp.concatenate(pieces, axis=1)
