"""The static tree that suits measured rates and a measured machine (Sequoia, arXiv 2402.12374).

A rate says how often the r-th best child of a node is what the target says, given that the path to
the node was accepted. A tree's expected tokens a step are 1, the target's own, and for each draft
the product of the rates along its path.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from spec.tree_shapes import TreeShape


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tree and what is expected of it.

    Attributes:
        shape: the tree.
        tokens: expected tokens a step.
        seconds: of a step: its draft passes and the target's.
    """

    shape: TreeShape
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def expected_tokens(shape: TreeShape, rate_LR: np.ndarray) -> float:
    """Returns the expected tokens a step of a tree.

    Args:
        shape: of the tree.
        rate_LR: rates in [0, 1] by level of the child, from the root's children on, and by rank;
            beyond the last level its rates are repeated, ranks beyond the last have rate 0.

    Raises:
        ValueError: if the rates are no such table.
    """
    rate_LR = _checked(rate_LR)
    reach = [1.0]
    for parent, rank, depth in zip(shape.parent[1:], shape.rank[1:], shape.depth[1:], strict=True):
        level = min(depth, len(rate_LR)) - 1
        rate = rate_LR[level, rank] if rank < rate_LR.shape[1] else 0.0
        reach.append(reach[parent] * float(rate))
    return sum(reach)


def best_tree(rate_LR: np.ndarray, size: int, depth: int) -> TreeShape:
    """Returns the tree that maximises `expected_tokens` among those that the limits allow.

    Sequoia's dynamic program (its section 3.1), with rates by level as well as by rank. Ranks are
    0, 1, 2, ... under every node, so that the tree suits children drawn without replacement, too.
    Nodes whose rate is 0 are left out: the tree may be smaller than asked for.

    Args:
        rate_LR: see `expected_tokens`.
        size: most nodes, root included, >= 1.
        depth: most levels below the root, >= 0.

    Raises:
        ValueError: for other limits, or if the rates are no table of rates.
    """
    rate_LR = _checked(rate_LR)
    if size < 1 or depth < 0:
        raise ValueError(f"size {size} and depth {depth}: give at least 1 and 0.")
    R = rate_LR.shape[1]
    # below[l][r, n]: most that n nodes can add below a node at level l that has r children
    # already, given that the path to it was accepted; take[l][r, n]: nodes of the next child's
    # subtree, that child included, 0 for no further child.
    below = np.zeros((depth + 1, R + 1, size))
    take = np.zeros((depth, R, size), np.int64)
    for level in reversed(range(depth)):
        rates = rate_LR[min(level, len(rate_LR) - 1)]
        for rank in reversed(range(R)):
            for n in range(1, size):
                m = np.arange(1, n + 1)
                gain = (
                    rates[rank] * (1 + below[level + 1, 0, m - 1]) + below[level, rank + 1, n - m]
                )
                best = int(np.argmax(gain))
                if gain[best] > 0:
                    below[level, rank, n], take[level, rank, n] = gain[best], m[best]
    parent, ranks = [0], [0]
    level_nodes = [(0, size - 1)]  # slot and nodes left for what is below it
    for level in range(depth):
        grown = []
        for slot, left in level_nodes:
            for rank in range(R):
                taken = int(take[level, rank, left])
                if not taken or rate_LR[min(level, len(rate_LR) - 1), rank] == 0:
                    break
                grown.append((len(parent), taken - 1))
                parent.append(slot)
                ranks.append(rank)
                left -= taken
        level_nodes = grown
    return TreeShape(tuple(parent), tuple(ranks))


def fastest(
    rate_LR: np.ndarray, draft_s: float, verify_s: Mapping[int, float], depth: int
) -> Choice:
    """Returns the tree of most expected tokens a second; the root alone if no draft pays.

    Sequoia section 3.3: a step takes a draft pass a level and one target pass.

    Args:
        rate_LR: see `expected_tokens`.
        draft_s: seconds of one pass of the drafter and its bookkeeping.
        verify_s: seconds of a target pass by number of nodes; these are the sizes tried. Size 1,
            plain decoding, must be among them.
        depth: most levels.

    Raises:
        ValueError: without size 1, for times that are not positive, or as `best_tree`.
    """
    if 1 not in verify_s or draft_s < 0 or min(verify_s.values()) <= 0:
        raise ValueError(
            f"draft_s {draft_s}, verify_s {dict(verify_s)}: give positive seconds, those of size 1 "
            "(plain decoding) among them."
        )
    best = Choice(TreeShape((0,), (0,)), 1.0, verify_s[1])
    for levels in range(1, depth + 1):
        for size in sorted(verify_s):
            shape = best_tree(rate_LR, size, levels)
            seconds = shape.depth[-1] * draft_s + verify_s[size]
            choice = Choice(shape, expected_tokens(shape, rate_LR), seconds)
            if choice.speed > best.speed:
                best = choice
    return best


def _checked(rate_LR: np.ndarray) -> np.ndarray:
    rate_LR = np.asarray(rate_LR, np.float64)
    if rate_LR.ndim != 2 or not rate_LR.size or not ((rate_LR >= 0) & (rate_LR <= 1)).all():
        raise ValueError(
            f"Rates of shape {rate_LR.shape} from {rate_LR.min(initial=0)} to "
            f"{rate_LR.max(initial=0)}: give a table of levels by ranks, each in 0..1."
        )
    return rate_LR
