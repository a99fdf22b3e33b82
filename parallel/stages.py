"""The third protocol: a model as pure functions that know when they talk and not to whom.

`parallel` trains and partitions any model that comes as `Stages`; it never imports one. The
composition is fixed here: embed, the blocks in order, loss. How often a block is recomputed, and
whether the blocks are unrolled or scanned, belongs to whoever composes them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallel.comm import LOCAL, Comm
from parallel.prefetch import run_prefetched
from parallel.seats import Seats


class Params(NamedTuple):
    """Weights as training keeps them.

    Attributes:
        outer: everything that is no block: embedding, final norm, head.
        blocks: the blocks, every leaf [L, ...], so that a pipeline shards L and a scan walks it.
    """

    outer: Any
    blocks: Any


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model in parts. B is the batch of the device, T the tokens of a sequence.

    A batch is any pytree whose leaves have B first.

    Attributes:
        embed: `(outer, batch, comm) -> x_BTD`.
        context: `(batch) -> ctx`, what all blocks share (rotary tables, mask), a pytree; no
            weights in it.
        block: `(block, x_BTD, ctx, comm) -> (x_BTD, extra)`, one block's weights without the L
            axis; `extra` is what inference wants of a block (its keys and values).
        head: `(outer, x_BTD, comm) -> logits_BTV`.
        loss: `(outer, x_BTD, batch, comm) -> (sum, weight)`, both scalars of at least float32:
            the weighted sum of the tokens' losses (nats) and the sum of their weights. The mean
            is taken once, over everything that makes one optimiser step.
        seats: `(ranks) -> Seats`: how axes sit on that many tensor ranks that they do not divide
            over, with `head` and `loss` blind to empty seats of the vocabulary. By default no axis
            is laid out anew.
    """

    embed: Callable[[Any, Any, Comm], jax.Array]
    context: Callable[[Any], Any]
    block: Callable[[Any, jax.Array, Any, Comm], tuple[jax.Array, Any]]
    head: Callable[[Any, jax.Array, Comm], jax.Array]
    loss: Callable[[Any, jax.Array, Any, Comm], tuple[jax.Array, jax.Array]]
    seats: Callable[[int], Seats] = lambda ranks: {}


def forward_loss(
    stages: Stages, params: Params, batch: Any, comm: Comm = LOCAL, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss sum and the weight sum, see `Stages.loss`; `how` as in `run_blocks`."""
    x = forward(stages, params, batch, comm, **how)
    return stages.loss(params.outer, x, batch, comm)


def forward(
    stages: Stages, params: Params, batch: Any, comm: Comm = LOCAL, **how: Any
) -> jax.Array:
    """Composes embedding and blocks; returns what the head reads, [B, T, D].

    Args:
        stages: the model.
        params: its weights.
        batch: see `Stages`.
        comm: communication.
        **how: see `run_blocks`.
    """
    x = stages.embed(params.outer, batch, comm)
    return run_blocks(stages, params.blocks, x, stages.context(batch), comm, **how)


def run_blocks(
    stages: Stages,
    blocks: Any,
    x: jax.Array,
    ctx: Any,
    comm: Comm,
    *,
    remat: bool = False,
    scan: bool = False,
    weights_of: Callable[[Any], Any] = lambda block: block,
    policy: Callable[..., bool] | None = None,
    prefetch: bool = False,
) -> jax.Array:
    """Runs blocks one after the other.

    Args:
        stages: the model.
        blocks: every leaf [L, ...].
        x: [B, T, D].
        ctx: see `Stages.context`.
        comm: communication.
        remat: keep only the input of each block for the backward pass and compute the rest again
            (Chen et al. 2016, arXiv 1604.06174).
        scan: one compiled block in a loop over L instead of L copies: compile time no longer
            grows with L, and nothing can be moved from one block into another.
        weights_of: makes a block's weights from what is kept of them, such as shards.
        policy: what of a block is kept for the backward pass, instead of everything (None).
        prefetch: with `scan`, see `parallel.prefetch`; what is kept is then each block's input.
    """
    if scan and prefetch:

        def alone(weights: Any, x: jax.Array, ctx: Any) -> jax.Array:
            return stages.block(weights, x, ctx, comm)[0]

        return run_prefetched(alone, weights_of, blocks, x, ctx)

    def block(x: jax.Array, kept: Any) -> tuple[jax.Array, None]:
        return stages.block(weights_of(kept), x, ctx, comm)[0], None

    if remat or policy is not None:
        # In an unrolled program XLA would merge the second computation with the first.
        block = jax.checkpoint(block, prevent_cse=not scan, policy=None if remat else policy)
    if scan:
        return jax.lax.scan(block, x, blocks)[0]
    for layer in range(num_blocks(blocks)):
        x, _ = block(x, one_block(blocks, layer))
    return x


def num_blocks(blocks: Any) -> int:
    """Returns L of stacked blocks."""
    return jax.tree.leaves(blocks)[0].shape[0]


def one_block(blocks: Any, layer: int) -> Any:
    """Returns the weights of one of stacked blocks, without the L axis."""
    return jax.tree.map(lambda leaf: leaf[layer], blocks)


def stack(blocks: list[Any]) -> Any:
    """Puts equal pytrees on top of each other: every leaf gets L first."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
