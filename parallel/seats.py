"""Axes that do not divide over devices, laid out so that they do: padded, or with copies.

Nine heads have no halves, and one key/value head cannot be shared out among two devices. A model
says which entry of such an axis sits in which seat (`Seats`); the seats divide. Some stay empty:
their weights are zeros. Some entries sit twice: devices that need the same one each have a copy.

Weights rest as they are, in shards of another axis. A step seats them, works on the seats, and
brings the gradient back: those of copies are summed, those of empty seats dropped. So there is no
copy that could drift and no padding that could grow, and optimisers, norms, checkpoints and
exports know nothing of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from parallel.sharding import TRAINING, letters_of, training_specs

# Axis letter -> the entry of the axis that sits in each seat, or EMPTY. Letters that are absent
# are laid out as they are.
Seats = Mapping[str, tuple[int, ...]]
EMPTY = -1


def seated(tree: Any, seats: Seats) -> Any:
    """Lays out every leaf by its letters: entries copied to their seats, zeros in empty ones.

    Args:
        tree: a pytree whose leaves lie under names such as `q_DHA`, stacked [L, ...] or not.
        seats: see `Seats`.
    """
    return _along(tree, seats, lambda x, index, axis: _picked(x, index, axis))


def unseated(tree: Any, seats: Seats) -> Any:
    """Brings the gradient of seated weights back to the entries: the transpose of `seated`.

    An entry gets the sum over its seats, taken once and in their order.
    """

    def back(x: jax.Array, index: Sequence[int], axis: int) -> jax.Array:
        at: list[list[int]] = [[] for _ in range(max(index) + 1)]
        for seat, entry in enumerate(index):
            if entry != EMPTY:
                at[entry].append(seat)
        rounds = [
            [mine[i] if i < len(mine) else EMPTY for mine in at] for i in range(max(map(len, at)))
        ]
        first, *others = (_picked(x, each, axis) for each in rounds)
        return sum(others, start=first)

    return _along(tree, seats, back)


def resting_specs(params: Any, sizes: Mapping[str, int], **how: Any) -> Any:
    """Returns the placement of weights between steps, whatever divides over `tensor`.

    That of `sharding.training_specs` where their axis divides. Where it does not, `tensor` goes to
    the first other axis that is left and divides, else to one that is in shards already and
    divides further; without one the weight is whole on each device of `tensor`.

    Args:
        params: see `training_specs`.
        sizes: devices along each mesh axis.
        **how: further arguments of `training_specs`.

    Raises:
        ValueError: if blocks do not divide over the stages of a pipeline.
    """
    ranks = sizes.get("tensor", 1)

    def rounded(path: tuple[Any, ...], array: Any) -> jax.ShapeDtypeStruct:
        """The shape with as many seats as divide."""
        shape = [*array.shape]
        for axis, letter in enumerate(_letters(path, array)):
            if TRAINING.get(letter) == "tensor":
                shape[axis] = -(-shape[axis] // ranks) * ranks
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    def moved(path: tuple[Any, ...], array: Any, spec: PartitionSpec) -> PartitionSpec:
        entries = [*spec, *[None] * (len(array.shape) - len(spec))]
        if "tensor" not in spec or array.shape[entries.index("tensor")] % ranks == 0:
            return spec
        entries[entries.index("tensor")] = None
        parts = [_names(entry) for entry in entries]
        free = sorted(range(len(parts)), key=lambda axis: (len(parts[axis]), axis))
        letters = _letters(path, array)
        for axis in free:
            product = ranks
            for name in parts[axis]:
                product *= sizes[name]
            if letters[axis] != "L" and array.shape[axis] % product == 0:
                entries[axis] = (*parts[axis], "tensor") if parts[axis] else "tensor"
                break
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    specs = training_specs(jax.tree_util.tree_map_with_path(rounded, params), sizes, **how)
    return jax.tree_util.tree_map_with_path(moved, params, specs)


def _along(
    tree: Any, seats: Seats, change: Callable[[jax.Array, Sequence[int], int], jax.Array]
) -> Any:
    """Applies `change(array, seats of the letter, axis)` along every axis that has seats."""

    def leaf(path: tuple[Any, ...], array: Any) -> Any:
        for axis, letter in enumerate(_letters(path, array)):
            if letter in seats:
                array = change(array, seats[letter], axis)
        return array

    return jax.tree_util.tree_map_with_path(leaf, tree) if seats else tree


def _letters(path: tuple[Any, ...], array: Any) -> str:
    """Returns a letter for every axis, L for that of stacked blocks; nothing for other names."""
    letters = letters_of(path)
    letters = "L" + letters if len(letters) + 1 == len(array.shape) else letters
    return letters if len(letters) == len(array.shape) else ""


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _picked(x: jax.Array, index: Sequence[int], axis: int) -> jax.Array:
    """Returns entries `index` of an axis, zeros where it is EMPTY; slices, as runs are long."""
    parts = []
    for begin, length in _runs(index):
        if begin == EMPTY:
            shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
            parts.append(jnp.zeros(shape, x.dtype))
        else:
            parts.append(lax.slice_in_dim(x, begin, begin + length, axis=axis))
    return lax.concatenate(parts, axis)


def _runs(index: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields first entry and length of runs that ascend by one, or are EMPTY throughout."""
    begin = 0
    for i in range(1, len(index) + 1):
        onwards = EMPTY if index[begin] == EMPTY else index[begin] + i - begin
        if i == len(index) or index[i] != onwards:
            yield index[begin], i - begin
            begin = i
