"""Which axis of an array lies on which axis of the mesh: one small table of letters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Axis letter (README) -> mesh axis. Letters that are absent are replicated.
TENSOR_PARALLEL = {"H": "tensor", "K": "tensor", "F": "tensor"}
# Training splits table and head by vocabulary, too, and blocks (L) over the stages of a pipeline.
TRAINING = {**TENSOR_PARALLEL, "V": "tensor", "U": "tensor", "L": "pipe"}


def spec_of(letters: str, rules: dict[str, str]) -> PartitionSpec:
    """Returns the placement of an array whose axes are called `letters`.

    Raises:
        ValueError: if two axes of the array would lie on one mesh axis.
    """
    axes = [rules.get(letter) for letter in letters]
    used = [axis for axis in axes if axis is not None]
    if len(set(used)) < len(used):
        raise ValueError(
            f"Axes {letters} would lie twice on one mesh axis: {axes}; change {rules}."
        )
    return PartitionSpec(*axes)


def specs_by_name(tree: Any, rules: dict[str, str]) -> Any:
    """Returns a placement for every leaf, read off the shape suffix of its name.

    Args:
        tree: a pytree whose leaves lie under names such as `q_DHA`: models, caches, states.
        rules: axis letter -> mesh axis.
    """

    def leaf(path: tuple[Any, ...], array: Any) -> PartitionSpec:
        letters = letters_of(path)
        return spec_of(letters, rules) if len(letters) == len(array.shape) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(leaf, tree)


def letters_of(path: tuple[Any, ...]) -> str:
    """Returns the shape suffix of a leaf's name, or nothing."""
    for key in reversed(path):
        _, _, letters = str(getattr(key, "name", getattr(key, "key", ""))).rpartition("_")
        if letters.isupper():
            return letters
    return ""


def axes_in(spec: Iterable[Any]) -> tuple[str, ...]:
    """Returns the mesh axes over which a placement, or some of its entries, split an array."""
    entries = [(each,) if isinstance(each, str) else each or () for each in spec]
    return tuple(axis for entry in entries for axis in entry)


def training_specs(params: Any, sizes: Mapping[str, int], shard: Sequence[str] = ("fsdp",)) -> Any:
    """Returns the placement of training's weights: what each device keeps between steps.

    By letter on `tensor` and `pipe` (`TRAINING`); then the first axis that is left and divides on
    all of `shard` together, numbered with the outermost first. A weight none of whose axes divides
    stays whole there, and its gradient is reduced.

    Args:
        params: `parallel.stages.Params` or a pytree of that form (arrays or shapes).
        sizes: devices along each mesh axis.
        shard: mesh axes over which shards lie; those that the mesh does not have are left out.

    Raises:
        ValueError: naming weight, axis and mesh axis where a size does not divide.
    """
    shard = tuple(axis for axis in shard if axis in sizes)
    parts = math.prod(sizes[axis] for axis in shard)

    def leaf(path: tuple[Any, ...], array: Any) -> PartitionSpec:
        letters = letters_of(path)
        if len(letters) + 1 == len(array.shape):
            letters = "L" + letters  # blocks lie on top of each other
        if len(letters) != len(array.shape):
            return PartitionSpec()
        placed: list[Any] = [TRAINING.get(letter) for letter in letters]
        placed = [axis if axis in sizes else None for axis in placed]
        for letter, axis, size in zip(letters, placed, array.shape, strict=True):
            if axis is not None and size % sizes[axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: axis {letter} has {size} entries, which do not "
                    f"divide over the {sizes[axis]} devices of mesh axis {axis!r}: change the mesh."
                )
        for i, letter in enumerate(letters):
            if shard and placed[i] is None and letter != "L" and array.shape[i] % parts == 0:
                placed[i] = shard if len(shard) > 1 else shard[0]
                break
        while placed and placed[-1] is None:  # the form in which JAX gives placements back
            placed.pop()
        return PartitionSpec(*placed)

    return jax.tree_util.tree_map_with_path(leaf, params)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Returns the same tree with each placement bound to `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda each: isinstance(each, PartitionSpec),
    )
