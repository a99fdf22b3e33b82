"""Static tree topologies: which ranks to draft under which parent."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """A topology known before anything is drafted, in level order. Hashable, hence static.

    Attributes:
        parent: slot of each node's parent, the root's (slot 0) is 0.
        rank: which of the parent's candidates a node holds, 0 = most probable; the root's is 0.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses what is no tree in level order with distinct siblings."""
        if len(self.parent) != len(self.rank) or not self.parent:
            raise ValueError(
                f"parent has {len(self.parent)} and rank {len(self.rank)} entries: give one of "
                "each for every node, root included."
            )
        bad = [i for i, p in enumerate(self.parent) if i and not 0 <= p < i]
        if self.parent[0] != 0 or self.rank[0] != 0 or bad or min(self.rank) < 0:
            raise ValueError(
                f"parent {self.parent}, rank {self.rank}: the root is node 0 with parent and rank "
                "0, every other parent must come before its child, ranks are >= 0."
            )
        if any(a > b for a, b in zip(self.depth, self.depth[1:], strict=False)):
            raise ValueError(f"Nodes must be in level order, got depths {self.depth}.")
        if len(set(zip(self.parent[1:], self.rank[1:], strict=True))) < len(self.parent) - 1:
            raise ValueError(f"Two siblings share a rank: parent {self.parent}, rank {self.rank}.")

    @property
    def size(self) -> int:
        """N, root included."""
        return len(self.parent)

    @property
    def depth(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        out = [0]
        for parent in self.parent[1:]:
            out.append(out[parent] + 1)
        return tuple(out)

    def levels(self) -> list[list[int]]:
        """Slots by depth, the root's level first."""
        depth = self.depth
        return [[i for i, d in enumerate(depth) if d == level] for level in range(depth[-1] + 1)]

    def ancestors(self) -> np.ndarray:
        """Returns bool [N, N]: (i, j) says that j is i or an ancestor of i."""
        mask = np.eye(self.size, dtype=bool)
        for i in range(1, self.size):
            mask[i] |= mask[self.parent[i]]
        return mask


def expansion(widths: Sequence[int]) -> TreeShape:
    """Returns the shape <k_1, ..., k_m>: at step i every leaf grows k_i children.

    SpecInfer section 3; its evaluation uses <1,1,3,1,1,1,1,1> (21 nodes with the root). The empty
    expansion is the root alone.

    Raises:
        ValueError: if a width is below 1.
    """
    parent, rank, leaves = [0], [0], [0]
    for width in widths:
        if width < 1:
            raise ValueError(f"Expansion {tuple(widths)}: every width must be at least 1.")
        grown = []
        for leaf in leaves:
            for r in range(width):
                grown.append(len(parent))
                parent.append(leaf)
                rank.append(r)
        leaves = grown
    return TreeShape(tuple(parent), tuple(rank))


def parse_expansion(text: str) -> TreeShape:
    """Reads "1,1,3,1" or "<1,1,3,1>".

    Raises:
        ValueError: if it is no list of whole numbers >= 1.
    """
    try:
        widths = [int(part) for part in text.strip().strip("<>").split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"Tree {text!r} is no list of widths: write it as 1,1,3,1.") from None
    if not widths:
        raise ValueError(f"Tree {text!r} has no widths: write it as 1,1,3,1.")
    return expansion(widths)
