"""What speculation saved: recorded on the device step by step, counted once, here.

Definitions (one row, or sums over rows; never means of means):

* step: one target pass in which the row was active.
* accepted: drafts that were emitted. The token that the target adds itself is no draft.
* acceptance rate: accepted / proposed depth, for a chain accepted / proposed drafts; at most 1.
* mean accept length: 1 + accepted / steps.
* tokens per step: emitted tokens / steps. Below the mean accept length where a step was cut.
* Where end-of-sequence, a budget or a stop string cuts a step, drafts beyond the cut count
  neither as proposed nor as accepted.
* rank r: the target's token after the root was the root's r-th child in draft order.
"""

import dataclasses
from collections.abc import Iterable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from spec.tree import TokenTree

# Columns of a step record, int32; a slot at which no step began holds -1 everywhere.
ACCEPTED, DEPTH, NODES, RANK = range(4)


def step_record(
    tree: TokenTree, first_B: jax.Array, path_B: jax.Array, emitted_B: jax.Array
) -> jax.Array:
    """Returns what one step did, int32 [B, 4]: accepted, proposed depth and drafts, rank.

    Args:
        tree: the proposal.
        first_B: int32 first token emitted.
        path_B: int32 nodes on the accepted path before any cut, the root included.
        emitted_B: int32 tokens emitted after the cut.

    Returns:
        The rank is -1 where the first token was no child of the root.
    """
    draft_BN = tree.valid_BN & (tree.depth_BN > 0)
    draft_BN &= (emitted_B == path_B)[:, None] | (tree.depth_BN <= emitted_B[:, None])
    # A cut turns the last accepted draft into the last emitted token: it was accepted too.
    accepted_B = jnp.minimum(path_B - 1, emitted_B)
    depth_B = jnp.max(jnp.where(draft_BN, tree.depth_BN, 0), axis=1)
    child_BN = tree.valid_BN & (tree.depth_BN == 1)
    order_BN = jnp.cumsum(child_BN, axis=1, dtype=jnp.int32) - 1
    hit_BN = child_BN & (tree.token_BN == first_B[:, None])
    rank_B = jnp.min(jnp.where(hit_BN, order_BN, tree.size), axis=1)
    rank_B = jnp.where(hit_BN.any(axis=1), rank_B, -1)
    nodes_B = jnp.sum(draft_BN, axis=1, dtype=jnp.int32)
    return jnp.stack((accepted_B, depth_B, nodes_B, rank_B), axis=1)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Counts of one row, or sums over rows; see the module for the definitions.

    Attributes:
        tokens: emitted tokens.
        steps: target passes.
        accepted: accepted drafts.
        proposed_depth: sum over steps of the depth of the proposal.
        proposed_nodes: sum over steps of the drafts in the proposal.
        accept_histogram: entry p = steps that accepted exactly p drafts.
        rank_histogram: entry r = steps whose first token was the root's r-th child.
    """

    tokens: int
    steps: int
    accepted: int
    proposed_depth: int
    proposed_nodes: int
    accept_histogram: tuple[int, ...]
    rank_histogram: tuple[int, ...]

    @classmethod
    def from_records(cls, record_ER: np.ndarray) -> Self:
        """Counts the records of the slots that were kept, [tokens, 4]."""
        tokens = len(record_ER)
        begin = np.flatnonzero(record_ER[:, ACCEPTED] >= 0)
        kept = np.diff(np.append(begin, tokens))  # tokens of each step within the kept slots
        accepted = np.minimum(record_ER[begin, ACCEPTED], kept)
        whole = record_ER[begin, ACCEPTED] < kept
        depth = np.where(whole, record_ER[begin, DEPTH], np.minimum(record_ER[begin, DEPTH], kept))
        rank = record_ER[begin, RANK]
        return cls(
            tokens=tokens,
            steps=len(begin),
            accepted=int(accepted.sum()),
            proposed_depth=int(depth.sum()),
            proposed_nodes=int(record_ER[begin, NODES].sum()),
            accept_histogram=tuple(np.bincount(accepted).tolist()),
            rank_histogram=tuple(np.bincount(rank[rank >= 0]).tolist()),
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per proposed level; NaN if nothing was proposed."""
        return self.accepted / self.proposed_depth if self.proposed_depth else float("nan")

    @property
    def mean_accept_length(self) -> float:
        """1 + accepted drafts per step; NaN without steps."""
        return 1 + self.accepted / self.steps if self.steps else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target pass; NaN without steps."""
        return self.tokens / self.steps if self.steps else float("nan")

    def position_rates(self) -> tuple[float, ...]:
        """Returns for i = 1, 2, ...: steps that accepted at least i drafts / steps."""
        at_least = np.cumsum(self.accept_histogram[::-1])[::-1][1:]
        return tuple(float(count / self.steps) for count in at_least)

    def success_within(self, k: int) -> float:
        """Returns the share of steps whose first token was among the root's first k children.

        On the target's own greedy path (`run_limit` 1, so that every position is a root) this is
        the success rate of SpecInfer table 1.
        """
        return sum(self.rank_histogram[:k]) / self.steps if self.steps else float("nan")


def total(parts: Iterable[Metrics]) -> Metrics:
    """Adds metrics up."""
    parts = list(parts)

    def histogram(name: str) -> tuple[int, ...]:
        rows = [getattr(part, name) for part in parts]
        size = max(map(len, rows), default=0)
        return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(size))

    def add(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    return Metrics(
        tokens=add("tokens"),
        steps=add("steps"),
        accepted=add("accepted"),
        proposed_depth=add("proposed_depth"),
        proposed_nodes=add("proposed_nodes"),
        accept_histogram=histogram("accept_histogram"),
        rank_histogram=histogram("rank_histogram"),
    )
