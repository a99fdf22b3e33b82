"""Blocks spread over stages: micro-batches pass from device to device along the axis `pipe`.

All devices run the same program. In tick t stage s works on micro-batch t - s; where there is none
(the bubble) it works on zeros, and nothing of it counts. The first stage embeds, the last computes
the loss; the others compute both too and drop them, as collectives must not depend on the rank.

* gpipe (Huang et al. 2019, arXiv 1811.06965): one loop forward, differentiated by JAX, so all
  micro-batches' activations are kept.
* 1f1b (Narayanan et al. 2021, arXiv 2104.04473): every tick does one forward and one backward pass,
  the latter from a kept stage input, of which at most 2 (stages - 1) + 1 are needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from parallel import collectives
from parallel.comm import Comm
from parallel.plan import Plan
from parallel.stages import Params, Stages, run_blocks

AXIS = "pipe"
# What a stage without a micro-batch would read; tests poison it.
EMPTY = 0.0


def pipeline_sums(
    stages: Stages,
    params: Params,
    micro: Any,
    comm: Comm,
    plan: Plan,
    outer_of: Callable[[Params], Params],
    how: dict[str, Any],
) -> tuple[jax.Array, jax.Array, Params]:
    """Returns this device's loss sum, weight sum and gradient; sums over `pipe` are the step's.

    Args:
        stages: the model.
        params: this stage's blocks, and the outer weights.
        micro: micro-batches, every leaf [M, b, ...].
        comm: for the blocks.
        plan: its `schedule`, and how it sends.
        outer_of: makes the outer weights whole.
        how: for `stages.run_blocks`.
    """
    P, s = lax.axis_size(AXIS), lax.axis_index(AXIS)
    M = jax.tree.leaves(micro)[0].shape[0]

    def batch_of(m: jax.Array) -> Any:
        at = jnp.clip(m, 0, M - 1)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), micro)

    def exists(m: jax.Array) -> jax.Array:
        return (m >= 0) & (m < M)

    def stage(params: Params, x: jax.Array, m: jax.Array) -> tuple[jax.Array, tuple]:
        """One stage over one micro-batch: what it passes on, and its share of the loss."""
        part = batch_of(m)
        params = outer_of(params)
        first = stages.embed(params.outer, part, comm)
        x = jnp.where(exists(m), jnp.where(s == 0, first, x), jnp.zeros_like(first))
        y = run_blocks(stages, params.blocks, x, stages.context(part), comm, **how)
        loss, weight = stages.loss(params.outer, y, part, comm)
        counts = exists(m) & (s == P - 1)
        zero = jnp.zeros_like(loss)
        return y, (jnp.where(counts, loss, zero), jnp.where(counts, weight, jnp.zeros_like(weight)))

    shape = jax.eval_shape(stage, params, _activation(stages, params, micro, comm, outer_of), s)[0]
    nothing = jnp.zeros_like(shape) + jnp.asarray(EMPTY, shape.dtype)
    onwards, back = [(i, i + 1) for i in range(P - 1)], [(i + 1, i) for i in range(P - 1)]
    tick_T = jnp.arange(M + P - 1, dtype=jnp.int32)
    passed = functools.partial(collectives.send, name=AXIS, how=plan.how("send", (AXIS,)))

    if plan.schedule == "gpipe":

        def total(params: Params) -> tuple[jax.Array, jax.Array]:
            def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
                x, loss, weight = carry
                y, (more, heavier) = stage(params, x, t - s)
                return (passed(y, onwards), loss + more, weight + heavier), None

            begin = jax.tree.map(
                jnp.zeros_like, jax.eval_shape(lambda: stage(params, nothing, s)[1])
            )
            (_, loss, weight), _ = lax.scan(tick, (nothing, *begin), tick_T)
            return loss, weight

        (loss, weight), gradient = jax.value_and_grad(total, has_aux=True)(params)
        return loss, weight, gradient

    kept = 2 * (P - 1) + 1

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
        x, dy, stash, gradient, loss, weight = carry
        m = t - s
        y, (more, heavier) = stage(params, x, m)
        stash = lax.dynamic_update_index_in_dim(stash, x, m % kept, 0)
        # The stage behind finished this micro-batch's backward pass in the tick before.
        n = t - (2 * (P - 1) - s)
        x_n = lax.dynamic_index_in_dim(stash, n % kept, keepdims=False)
        (y_n, (loss_n, _)), pull = jax.vjp(lambda p, x: _no_aux(stage(p, x, n)), params, x_n)
        dy = jnp.where(exists(n) & (s < P - 1), dy, jnp.zeros_like(y_n))
        seed = jnp.where(exists(n), jnp.ones_like(loss_n), jnp.zeros_like(loss_n))
        d_params, dx = pull((dy, (seed, jnp.zeros_like(loss_n))))
        gradient = jax.tree.map(jnp.add, gradient, d_params)
        sent = passed(y, onwards), passed(dx, back)
        return (*sent, stash, gradient, loss + more, weight + heavier), None

    begin = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: stage(params, nothing, s)[1]))
    stash = jnp.stack([nothing] * kept)
    zero = jax.tree.map(jnp.zeros_like, params)
    carry = (nothing, jnp.zeros_like(nothing), stash, zero, *begin)
    ticks = jnp.arange(M + 2 * (P - 1), dtype=jnp.int32)
    (_, _, _, gradient, loss, weight), _ = lax.scan(tick, carry, ticks)
    return loss, weight, gradient


def _no_aux(out: tuple[jax.Array, tuple]) -> tuple[jax.Array, tuple]:
    y, (loss, weight) = out
    return y, (loss, weight.astype(loss.dtype))


def _activation(
    stages: Stages, params: Params, micro: Any, comm: Comm, outer_of: Callable[[Params], Params]
) -> Any:
    """Returns the shape of what passes between stages."""
    return jax.eval_shape(
        lambda params, micro: stages.embed(
            outer_of(params).outer, jax.tree.map(lambda a: a[0], micro), comm
        ),
        params,
        micro,
    )
