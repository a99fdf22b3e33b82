"""A scanned stack of blocks whose next weights are on their way while this block computes.

Under ZeRO-3 every block's weights are gathered before use. In an unrolled program the compiler may
start a gather as early as it likes, since it waits for no product; in a loop it may not: an
iteration's gather belongs to the iteration. So the loop carries the gathered weights, and each
iteration gathers those of the next, forward and backward. The backward pass is written out: it
keeps the input of each block only, and gathers every block's weights once more.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# (weights, x, ctx) -> x
Block = Callable[[Any, jax.Array, Any], jax.Array]


def run_prefetched(
    block: Block, weights_of: Callable[[Any], Any], shards: Any, x: jax.Array, ctx: Any
) -> jax.Array:
    """Runs blocks one after the other; equal to a plain loop over `block(weights_of(shard), ...)`.

    Args:
        block: one block; closes over no array.
        weights_of: gathers a block's weights from this device's shards; closes over no array.
        shards: every leaf [L, ...].
        x: [B, T, D].
        ctx: what all blocks share; gets no gradient.
    """

    @jax.custom_vjp
    def run(shards: Any, x: jax.Array, ctx: Any) -> jax.Array:
        return forward(shards, x, ctx)[0]

    def forward(shards: Any, x: jax.Array, ctx: Any) -> tuple[jax.Array, Any]:
        def body(carry: tuple, following: Any) -> tuple[tuple, jax.Array]:
            x, weights = carry
            arriving = weights_of(following)
            return (block(weights, x, ctx), arriving), x

        first = weights_of(jax.tree.map(lambda a: a[0], shards))
        # The last iteration has nothing to fetch: it is taken out of the loop.
        (x, weights), inputs = lax.scan(body, (x, first), jax.tree.map(lambda a: a[1:], shards))
        return block(weights, x, ctx), (shards, inputs, x, ctx)

    def backward(kept: Any, dy: jax.Array) -> tuple[Any, jax.Array, None]:
        shards, inputs, x_last, ctx = kept

        def one(shard: Any, weights: Any, x: jax.Array, dy: jax.Array) -> tuple[Any, jax.Array]:
            _, pull = jax.vjp(lambda weights, x: block(weights, x, ctx), weights, x)
            d_weights, dx = pull(dy)
            _, scatter = jax.vjp(weights_of, shard)  # its gather is used by nobody, and dropped
            return scatter(d_weights)[0], dx

        def body(carry: tuple, of: tuple) -> tuple[tuple, Any]:
            dy, weights = carry
            shard, before, x = of
            arriving = weights_of(before)
            d_shard, dx = one(shard, weights, x, dy)
            return (dx, arriving), d_shard

        L = jax.tree.leaves(shards)[0].shape[0]
        last = weights_of(jax.tree.map(lambda a: a[L - 1], shards))
        every = jnp.concatenate((inputs, x_last[None]))[1:]
        later = jax.tree.map(lambda a: a[1:], shards)
        earlier = jax.tree.map(lambda a: a[:-1], shards)
        (dy, weights), d_later = lax.scan(body, (dy, last), (later, earlier, every), reverse=True)
        x_first = inputs[0] if L > 1 else x_last
        d_first, dx = one(jax.tree.map(lambda a: a[0], shards), weights, x_first, dy)
        d_shards = jax.tree.map(lambda a, b: jnp.concatenate((a[None], b)), d_first, d_later)
        return d_shards, dx, None

    run.defvjp(forward, backward)
    return run(shards, x, ctx)
