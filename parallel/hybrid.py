"""Loss and gradient of a step on a mesh, every collective named by a plan: under `shard_map`.

One device holds a shard of every weight (`sharding.training_specs`) and a part of the batch.
Weights vary over the whole mesh before they are differentiated, so JAX inserts no reduction of its
own; what a plan says is all that is sent:

    shards   weights gathered before use, their gradients scattered (ZeRO, arXiv 1910.02054)
    tensor   inside embedding, blocks, head and loss, through `comm` (`parallel.sequence`)
    pipe     activations, see `parallel.pipeline`
    others   gradients reduced; also over every other axis on which a weight is whole

Shards lie over `fsdp`, or over a slow and a fast axis together, such as `host` and `fsdp`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from parallel import collectives
from parallel.comm import LOCAL, Comm
from parallel.partition import flat
from parallel.pipeline import pipeline_sums
from parallel.plan import BATCH, Plan
from parallel.sequence import SequenceComm
from parallel.sharding import axes_in
from parallel.stages import Params, Stages, forward_loss


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things lie and what is sent.

    Attributes:
        specs: placement of every weight, a pytree like the weights.
        sizes: devices along each mesh axis.
        plan: what is sent how.
        compute_dtype: what weights are gathered and computed in; None for their own.
    """

    specs: Any
    sizes: Mapping[str, int]
    plan: Plan
    compute_dtype: jax.typing.DTypeLike | None

    @property
    def comm(self) -> Comm:
        """What blocks talk through."""
        if "tensor" not in self.sizes:
            return LOCAL
        plan = self.plan
        return SequenceComm("tensor", plan.column, plan.row, plan.table, plan.head, plan.loss)

    @property
    def shard(self) -> tuple[str, ...]:
        """Axes of this mesh over which shards lie."""
        return self.plan.sharded(self.sizes)

    def vary(self, params: Any) -> Any:
        """Marks weights as different on every device, before they are differentiated."""

        def leaf(w: jax.Array, spec: PartitionSpec) -> jax.Array:
            whole = tuple(axis for axis in self.sizes if axis not in axes_in(spec))
            return lax.pcast(w, whole, to="varying") if whole else w

        return jax.tree.map(leaf, params, self.specs)

    def whole(self, shards: Any, specs: Any, dtype: jax.typing.DTypeLike | None) -> Any:
        """Gathers weights over their shards, cast to `dtype`; gradients come back as shards."""
        leaves = jax.tree.leaves(shards)
        axes = [self._split(spec) for spec in jax.tree.leaves(specs, is_leaf=_is_spec)]
        plan, over = self.plan, self.shard
        if plan.bucket == "block":
            out = _gather_together(tuple(leaves), tuple(axes), over, plan, dtype)
        else:
            pairs = zip(leaves, axes, strict=True)
            out = tuple(_gather_together((w,), (axis,), over, plan, dtype)[0] for w, axis in pairs)
        return jax.tree.unflatten(jax.tree.structure(shards), out)

    def shards(self, gradient: Any, specs: Any) -> Any:
        """Scatters the gradient of whole weights: sums, keeps this device's shard."""

        def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
            axis, over = self._split(spec), self.shard
            if axis is None:
                return g
            return collectives.reduce_scatter(g, axis, over, self.plan.how("scatter", over))

        return jax.tree.map(leaf, gradient, specs)

    def reduced(self, gradient: Any, over: tuple[str, ...]) -> Any:
        """Sums the gradient of each weight over those of `over` on which the weight is whole."""
        replicas = self.plan.axes("reduce", self.sizes)

        def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
            if replicas:
                g = collectives.all_reduce(g, self.plan.how("reduce", replicas))
            done = (*replicas, *axes_in(spec))
            rest = tuple(axis for axis in over if axis not in done)
            return collectives.all_reduce(g, flat("all_reduce", rest)) if rest else g

        if self.plan.order == "free":
            return jax.tree.map(leaf, gradient, self.specs)
        leaves = jax.tree.leaves(gradient)
        specs = jax.tree.leaves(self.specs, is_leaf=_is_spec)
        done: list[jax.Array] = []
        for g, spec in zip(reversed(leaves), reversed(specs), strict=True):
            done.append(leaf(_after(g, done[-1]) if done else g, spec))
        return jax.tree.unflatten(jax.tree.structure(gradient), done[::-1])

    def _split(self, spec: PartitionSpec) -> int | None:
        """Returns the axis of a weight that is split into shards."""
        found = (i for i, entry in enumerate(spec) if {*axes_in([entry])} & {*self.shard})
        return next(found, None)


def sharded_sums(
    stages: Stages,
    layout: Layout,
    accumulate: int,
    remat: bool,
    scan: bool,
    params: Any,
    batch: Any,
) -> tuple[jax.Array, jax.Array, Params]:
    """Returns loss sum, weight sum and gradient of the loss sum of the whole step.

    Args:
        stages: the model.
        layout: see `Layout`.
        accumulate: micro-batches, one after the other; those of a pipeline.
        remat: see `stages.forward`.
        scan: see `stages.forward`.
        params: this device's shards.
        batch: this device's part.
    """
    plan, comm = layout.plan, layout.comm
    params = layout.vary(params)
    micro = jax.tree.map(lambda a: a.reshape(accumulate, -1, *a.shape[1:]), batch)
    gather_all = bool(layout.shard) and plan.zero < 3
    parts = math.prod(layout.sizes[axis] for axis in layout.shard)
    keep = functools.partial(_keep_no_weights, layout.shard)
    block_specs = jax.tree.map(
        lambda spec: PartitionSpec(*spec[1:]), layout.specs.blocks, is_leaf=_is_spec
    )
    # Gathered at once they keep their dtype, so that their gradients add up in it.
    ready = layout.whole(params, layout.specs, None) if gather_all else params
    dtype = layout.compute_dtype

    def cast(tree: Any) -> Any:
        return tree if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), tree)

    def weights_of(block: Any) -> Any:
        return cast(block) if gather_all else layout.whole(block, block_specs, dtype)

    def outer_of(params: Params) -> Params:
        outer, specs = params.outer, layout.specs.outer
        outer = cast(outer) if gather_all else layout.whole(outer, specs, dtype)
        return Params(outer, params.blocks)

    how: dict[str, Any] = {
        "remat": remat,
        "scan": scan,
        "weights_of": weights_of,
        "prefetch": plan.prefetch,
        "policy": keep if parts > 1 and not (gather_all or remat) else None,
    }

    every = tuple(layout.sizes)
    if "pipe" in layout.sizes:
        loss, weight, gradient = pipeline_sums(stages, ready, micro, comm, plan, outer_of, how)
        gradient = layout.shards(gradient, layout.specs) if gather_all else gradient
        gradient = layout.reduced(gradient, every)
        batch_axes = tuple(axis for axis in (*BATCH, "pipe") if axis in layout.sizes)
        return lax.psum(loss, batch_axes), lax.psum(weight, batch_axes), gradient

    def loss_sum(params: Params, part: Any) -> tuple[jax.Array, jax.Array]:
        return forward_loss(stages, outer_of(params), part, comm, **how)

    def one(part: Any) -> tuple[jax.Array, jax.Array, Any]:
        (loss, weight), gradient = jax.value_and_grad(loss_sum, has_aux=True)(ready, part)
        if gather_all and plan.zero == 2:
            gradient = layout.shards(gradient, layout.specs)
        if plan.when == "each":
            gradient = layout.reduced(gradient, every)
        return loss, weight, gradient

    if accumulate == 1:
        loss, weight, gradient = one(jax.tree.map(lambda a: a[0], micro))
    else:
        first = jax.eval_shape(one, jax.tree.map(lambda a: a[0], micro))
        zero = jax.tree.map(jnp.zeros_like, first)

        def body(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(part)), None

        (loss, weight, gradient), _ = lax.scan(body, zero, micro)
    if gather_all and plan.zero == 1:
        gradient = layout.shards(gradient, layout.specs)
    if plan.when == "end":
        gradient = layout.reduced(gradient, every)
    batch_axes = tuple(axis for axis in BATCH if axis in layout.sizes)
    if batch_axes:
        loss, weight = lax.psum((loss, weight), batch_axes)
    return loss, weight, gradient


def _keep_no_weights(shard: tuple[str, ...], primitive: Any, *_: Any, **parameters: Any) -> bool:
    """What a block under ZeRO-3 keeps for its backward pass: products, and what was received.

    Not the weights: they are gathered again, over `shard`.
    """
    axes = parameters.get("axis_name", parameters.get("axes", ()))
    names = axes if isinstance(axes, tuple) else (axes,)
    received = any(isinstance(name, str) for name in names)
    return not {*names} & {*shard} and (received or primitive.name == "dot_general")


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _after(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """Returns `x`, but not before `earlier` is there.

    A true dependency: XLA:CPU drops optimisation barriers, and may not drop 0 * y, which is NaN for
    a y that is not finite (as is then the step, which is skipped).
    """
    wait = 0 * earlier.ravel()[0]
    x_type, wait_type = (jax.typeof(a).manual_axis_type for a in (x, wait))
    missing = tuple(x_type.varying - wait_type.varying)
    wait = lax.pcast(wait, missing, to="varying") if missing else wait
    return x + wait.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather_together(
    weights: tuple[jax.Array, ...],
    axes: tuple[int | None, ...],
    over: tuple[str, ...],
    plan: Plan,
    dtype: jax.typing.DTypeLike | None,
) -> tuple[jax.Array, ...]:
    """Casts weights and gathers those that have an axis for it over `over`, in one collective.

    In the backward pass gradients are widened again before they are summed.
    """
    cast = [w if dtype is None else w.astype(dtype) for w in weights]
    moving = {i: axis for i, axis in enumerate(axes) if axis is not None}
    if not moving:
        return tuple(cast)
    if len(moving) == 1:
        ((i, axis),) = moving.items()
        cast[i] = collectives.all_gather(cast[i], axis, over, plan.how("gather", over))
        return tuple(cast)
    front = [jnp.moveaxis(cast[i], axis, 0) for i, axis in moving.items()]
    flat_n = jnp.concatenate([w.ravel() for w in front])
    whole = collectives.all_gather(flat_n, 0, over, plan.how("gather", over))
    by_shard = whole.reshape(-1, flat_n.size)
    start = 0
    for (i, axis), w in zip(moving.items(), front, strict=True):
        part = by_shard[:, start : start + w.size].reshape(-1, *w.shape[1:])
        cast[i] = jnp.moveaxis(part, 0, axis)
        start += w.size
    return tuple(cast)


def _gather_forward(
    weights: tuple[jax.Array, ...],
    axes: tuple[int | None, ...],
    over: tuple[str, ...],
    plan: Plan,
    dtype: jax.typing.DTypeLike | None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    # Only their dtypes are wanted later.
    empty = tuple(w.ravel()[:0] for w in weights)
    return _gather_together(weights, axes, over, plan, dtype), empty


def _gather_backward(
    axes: tuple[int | None, ...],
    over: tuple[str, ...],
    plan: Plan,
    dtype: jax.typing.DTypeLike | None,
    kept: tuple[jax.Array, ...],
    dw: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...]]:
    wide = [g.astype(w.dtype) for g, w in zip(dw, kept, strict=True)]
    moving = {i: axis for i, axis in enumerate(axes) if axis is not None}
    if len(moving) == 1:
        ((i, axis),) = moving.items()
        wide[i] = collectives.reduce_scatter(wide[i], axis, over, plan.how("scatter", over))
    elif moving:
        g = collectives.size_of(over)
        front = [jnp.moveaxis(wide[i], axis, 0) for i, axis in moving.items()]
        rows = [w.reshape(g, -1) for w in front]
        whole = jnp.concatenate(rows, axis=1).ravel()
        mine = collectives.reduce_scatter(whole, 0, over, plan.how("scatter", over))
        start = 0
        for (i, axis), w, row in zip(moving.items(), front, rows, strict=True):
            part = mine[start : start + row.shape[1]].reshape(-1, *w.shape[1:])
            wide[i] = jnp.moveaxis(part, 0, axis)
            start += row.shape[1]
    return (tuple(wide),)


_gather_together.defvjp(_gather_forward, _gather_backward)
