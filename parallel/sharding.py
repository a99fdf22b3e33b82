"""Which axis of an array lies on which axis of the mesh: one small table of letters."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Axis letter (README) -> mesh axis. Letters that are absent are replicated.
TENSOR_PARALLEL = {"H": "tensor", "K": "tensor", "F": "tensor"}


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
        names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        letters = next(
            (
                name.rsplit("_", 1)[1]
                for name in reversed(names)
                if "_" in name and name.rsplit("_", 1)[1].isupper()
            ),
            "",
        )
        return spec_of(letters, rules) if len(letters) == len(array.shape) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(leaf, tree)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Returns the same tree with each placement bound to `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda each: isinstance(each, PartitionSpec),
    )
