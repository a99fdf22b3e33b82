"""Collectives under `shard_map`, plain or partitioned: one signature, one result.

Every function takes a `Composition` (`parallel.partition`); `partition.flat` is the plain one. The
backward pass of a gather is a scatter by the mirrored composition, and the other way round, so a
plan decides both. Sizes: a scattered or exchanged axis must divide by the group (refused by name);
an all-reduce pads its data with zeros and cuts them off again; chunks may differ by one element.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from parallel.partition import Composition, Op


def size_of(axes: Sequence[str]) -> int:
    """Returns the number of devices along mesh axes, inside `shard_map`."""
    out = 1
    for axis in axes:
        out *= lax.axis_size(axis)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_reduce(x: jax.Array, how: Composition) -> jax.Array:
    """Returns the sum over the group, the same bits on every device.

    The gradient of a device's part is the gradient of the sum: nothing is sent backwards.

    Args:
        x: any shape; varies over the group's axes.
        how: composition of an all-reduce.
    """
    return _all_reduce(x, how)


def _all_reduce(x: jax.Array, how: Composition) -> jax.Array:
    parts = [_reduce_part(part, how.ops) for part in cut(x.ravel(), how.chunks, 0)]
    return jnp.concatenate(parts).reshape(x.shape)


def _reduce_part(x: jax.Array, ops: tuple[Op, ...]) -> jax.Array:
    size, x = x.size, _padded(x, ops)
    for op in ops:
        if op.primitive == "all_reduce":
            x = lax.psum(x, op.axes)
        elif op.primitive in ("reduce_scatter", "ring_scatter"):
            x = _scatter(x, op)
        else:
            x = _joined(x, op)
    return x[:size]


def _padded(x: jax.Array, ops: tuple[Op, ...]) -> jax.Array:
    """Appends zeros until every op that cuts the array finds it divisible."""
    cuts = [op.axes for op in ops if op.primitive in ("reduce_scatter", "ring_scatter", "scatter")]
    return jnp.pad(x, (0, -x.size % size_of([axis for axes in cuts for axis in axes])))


def _all_reduce_forward(x: jax.Array, how: Composition) -> tuple[jax.Array, None]:
    return all_reduce(x, how), None


def _all_reduce_backward(how: Composition, _: None, dy: jax.Array) -> tuple[jax.Array]:
    axes = tuple(dict.fromkeys(axis for op in how.ops for axis in op.axes))
    return (lax.pcast(dy, axes, to="varying"),)


all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def all_gather(x: jax.Array, axis: int, axes: tuple[str, ...], how: Composition) -> jax.Array:
    """Returns the shards of the group side by side along `axis`, numbered by `axes`.

    Args:
        x: this device's shard.
        axis: of the array.
        axes: mesh axes of the group, outermost first.
        how: composition of an all-gather.
    """
    g, n = size_of(axes), x.shape[axis]
    parts = []
    for part in cut(x, how.chunks, axis):
        for op in how.ops:
            part = _gather(part, op, axis)
        parts.append(part.reshape(*x.shape[:axis], g, -1, *x.shape[axis + 1 :]))
    whole = jnp.concatenate(parts, axis + 1).reshape(*x.shape[:axis], g * n, *x.shape[axis + 1 :])
    # The last op's shards lie outermost.
    arrived = tuple(name for op in reversed(how.ops) for name in op.axes)
    return _renumber(whole, axis, arrived, axes)


def _all_gather_forward(
    x: jax.Array, axis: int, axes: tuple[str, ...], how: Composition
) -> tuple[jax.Array, None]:
    return all_gather(x, axis, axes, how), None


def _all_gather_backward(
    axis: int, axes: tuple[str, ...], how: Composition, _: None, dy: jax.Array
) -> tuple[jax.Array]:
    return (reduce_scatter(dy, axis, axes, how.mirrored()),)


all_gather.defvjp(_all_gather_forward, _all_gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def reduce_scatter(x: jax.Array, axis: int, axes: tuple[str, ...], how: Composition) -> jax.Array:
    """Returns this device's part, along `axis`, of the sum over the group.

    Args:
        x: the whole array; its `axis` divides by the group.
        axis: of the array.
        axes: mesh axes of the group, outermost first.
        how: composition of a reduce-scatter.

    Raises:
        ValueError: if the axis does not divide.
    """
    g = _divide(x, axis, axes)
    leaving = tuple(name for op in how.ops for name in op.axes)
    x = _renumber(x, axis, axes, leaving)
    by_shard = x.reshape(*x.shape[:axis], g, -1, *x.shape[axis + 1 :])
    parts = []
    for part in cut(by_shard, how.chunks, axis + 1):
        part = part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
        for op in how.ops:
            part = _scatter(part, op, axis)
        parts.append(part)
    return jnp.concatenate(parts, axis)


def _reduce_scatter_forward(
    x: jax.Array, axis: int, axes: tuple[str, ...], how: Composition
) -> tuple[jax.Array, None]:
    return reduce_scatter(x, axis, axes, how), None


def _reduce_scatter_backward(
    axis: int, axes: tuple[str, ...], how: Composition, _: None, dy: jax.Array
) -> tuple[jax.Array]:
    return (all_gather(dy, axis, axes, how.mirrored()),)


reduce_scatter.defvjp(_reduce_scatter_forward, _reduce_scatter_backward)


def all_to_all(x: jax.Array, axis: int, axes: tuple[str, ...], how: Composition) -> jax.Array:
    """Sends part i of `axis` to device i of the group; what arrives lies in the senders' order.

    Args:
        x: its `axis` divides by the group.
        axis: of the array; split and joined.
        axes: mesh axes of the group, outermost first.
        how: composition of an all-to-all.

    Raises:
        ValueError: if the axis does not divide.
    """
    g = _divide(x, axis, axes)
    sizes = tuple(lax.axis_size(name) for name in axes)
    moved = jnp.moveaxis(x, axis, 0).reshape(g, -1, *x.shape[:axis], *x.shape[axis + 1 :])
    parts = []
    for part in cut(moved, how.chunks, 1):
        part = part.reshape(*sizes, *part.shape[1:])
        for op in how.ops:
            part = _exchange(part, op, axes)
        parts.append(part.reshape(g, -1, *moved.shape[2:]))
    joined = jnp.concatenate(parts, 1)
    return jnp.moveaxis(joined.reshape(x.shape[axis], *moved.shape[2:]), 0, axis)


def broadcast(x: jax.Array, axes: tuple[str, ...], how: Composition) -> jax.Array:
    """Returns the array of the group's first device, on every device.

    Args:
        x: any shape; only the first device's is used.
        axes: mesh axes of the group.
        how: composition of a broadcast.
    """
    flat = x.ravel()
    parts = []
    for part in cut(flat, how.chunks, 0):
        size = part.size
        part = _padded(jnp.where(_first(axes), part, jnp.zeros_like(part)), how.ops)
        for op in how.ops:
            if op.primitive == "broadcast":
                part = lax.psum(part, op.axes)
            elif op.primitive == "scatter":
                # Others send zeros: a sum of parts, of which one is not nothing.
                part = _scatter(part, Op("reduce_scatter", op.axes))
            else:
                part = _joined(part, op)
        parts.append(part[:size])
    return jnp.concatenate(parts).reshape(x.shape)


def reduce(x: jax.Array, axes: tuple[str, ...], how: Composition) -> jax.Array:
    """Returns the sum over the group on its first device, zeros on the others.

    Args:
        x: any shape.
        axes: mesh axes of the group.
        how: composition of a reduce.
    """
    whole = tuple(Op("all_reduce", op.axes) if op.primitive == "reduce" else op for op in how.ops)
    total = _all_reduce(x, Composition(whole, how.chunks))
    return jnp.where(_first(axes), total, jnp.zeros_like(total))


def send(x: jax.Array, pairs: Sequence[tuple[int, int]], name: str, how: Composition) -> jax.Array:
    """Sends an array along a mesh axis, in chunks; zeros where nobody sends to.

    Args:
        x: any shape.
        pairs: places along the axis, from and to; each sends and receives once at most.
        name: mesh axis.
        how: composition of a send.
    """
    parts = [lax.ppermute(part, name, pairs) for part in cut(x.ravel(), how.chunks, 0)]
    return jnp.concatenate(parts).reshape(x.shape) if len(parts) > 1 else parts[0].reshape(x.shape)


def cut(x: jax.Array, chunks: int, axis: int) -> list[jax.Array]:
    """Cuts into pieces that differ by one entry at most; never more pieces than entries."""
    return jnp.array_split(x, min(chunks, max(x.shape[axis], 1)), axis)


def _first(axes: tuple[str, ...]) -> jax.Array:
    return functools.reduce(jnp.logical_and, [lax.axis_index(axis) == 0 for axis in axes])


def _divide(x: jax.Array, axis: int, axes: Sequence[str]) -> int:
    g = size_of(axes)
    if x.shape[axis] % g:
        raise ValueError(
            f"Axis {axis} of {x.shape} does not divide into the {g} devices of {axes}: change the "
            "size, or the mesh."
        )
    return g


def _renumber(x: jax.Array, axis: int, have: tuple[str, ...], want: tuple[str, ...]) -> jax.Array:
    """Reorders the shards along `axis` from one nesting of mesh axes to another; a local copy."""
    if have == want:
        return x
    sizes = [lax.axis_size(name) for name in have]
    split = x.reshape(*x.shape[:axis], *sizes, -1, *x.shape[axis + 1 :])
    order = [axis + have.index(name) for name in want]
    rest = [i for i in range(split.ndim) if i not in order]
    return split.transpose(*rest[:axis], *order, *rest[axis:]).reshape(x.shape)


def _joined(x: jax.Array, op: Op) -> jax.Array:
    """Gathers what the type system is to know as the same on all devices."""
    return lax.all_gather(x, op.axes, axis=0, tiled=True, to="invarying")


def _gather(x: jax.Array, op: Op, axis: int) -> jax.Array:
    if op.primitive == "ring_gather":
        return _ring_gather(x, op.axes[0], axis)
    return lax.all_gather(x, op.axes, axis=axis, tiled=True)


def _scatter(x: jax.Array, op: Op, axis: int = 0) -> jax.Array:
    if op.primitive == "ring_scatter":
        return _ring_scatter(x, op.axes[0], axis)
    return lax.psum_scatter(x, op.axes, scatter_dimension=axis, tiled=True)


def _ring(name: str) -> list[tuple[int, int]]:
    g = lax.axis_size(name)
    return [(i, (i + 1) % g) for i in range(g)]


def _ring_gather(x: jax.Array, name: str, axis: int) -> jax.Array:
    """G - 1 permutations; each device sends on what it received last."""
    g, me = lax.axis_size(name), lax.axis_index(name)
    shards = [x]
    for _ in range(g - 1):
        shards.append(lax.ppermute(shards[-1], name, _ring(name)))
    # Shard i arrived in step (me - i) mod g.
    whole = jnp.stack(shards)[(me - jnp.arange(g, dtype=jnp.int32)) % g]
    joined = jnp.moveaxis(whole, 0, axis)
    return joined.reshape(*x.shape[:axis], g * x.shape[axis], *x.shape[axis + 1 :])


def _ring_scatter(x: jax.Array, name: str, axis: int) -> jax.Array:
    """G - 1 permutations of partial sums; device i ends with part i."""
    g, me = lax.axis_size(name), lax.axis_index(name)
    parts = jnp.stack(jnp.split(x, g, axis))
    total = parts[(me - 1) % g]
    for step in range(1, g):
        total = lax.ppermute(total, name, _ring(name)) + parts[(me - 1 - step) % g]
    return total


def _exchange(x: jax.Array, op: Op, axes: tuple[str, ...]) -> jax.Array:
    """Exchanges along the leading dimensions that belong to the op's mesh axes."""
    positions = [axes.index(name) for name in op.axes]
    front = jnp.moveaxis(x, positions, range(len(positions)))
    shape = front.shape
    g = size_of(op.axes)
    blocks = front.reshape(g, *shape[len(positions) :])
    if op.primitive == "pairwise":
        blocks = _pairwise(blocks, op.axes[0])
    else:
        blocks = lax.all_to_all(blocks, op.axes, 0, 0, tiled=True)
    return jnp.moveaxis(blocks.reshape(shape), range(len(positions)), positions)


def _pairwise(x: jax.Array, name: str) -> jax.Array:
    """G - 1 permutations: in step s every device sends to the one s places on."""
    g, me = lax.axis_size(name), lax.axis_index(name)
    arrived = [x[me]]
    for step in range(1, g):
        pairs = [(i, (i + step) % g) for i in range(g)]
        arrived.append(lax.ppermute(x[(me + step) % g], name, pairs))
    # What came from device j arrived in step (me - j) mod g.
    return jnp.stack(arrived)[(me - jnp.arange(g, dtype=jnp.int32)) % g]
