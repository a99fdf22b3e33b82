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

# A step record, int32: accepted, rank, then the drafts at depth 1, 2, ... of the proposal. A slot
# at which no step began holds -1 everywhere.
ACCEPTED, RANK, LEVELS = range(3)


def record_size(depth: int) -> int:
    """Returns R, columns of the record of a drafter whose trees are at most `depth` deep."""
    return LEVELS + depth


def step_record(
    proposed: TokenTree, tree: TokenTree, first_B: jax.Array, accepted_B: jax.Array, depth: int
) -> jax.Array:
    """Returns what one step did before any cut, int32 [B, R].

    Args:
        proposed: the drafter's tree, whose root's children give the rank: how good a guess was
            does not depend on the budget that is left.
        tree: the part of it that the target saw.
        first_B: int32 first token emitted.
        accepted_B: int32 drafts accepted.
        depth: deepest level that the drafter can propose, static.

    Returns:
        The rank is -1 where the first token was no child of the root.
    """
    child_BN = proposed.valid_BN & (proposed.depth_BN == 1)
    order_BN = jnp.cumsum(child_BN, axis=1, dtype=jnp.int32) - 1
    hit_BN = child_BN & (proposed.token_BN == first_B[:, None])
    rank_B = jnp.min(jnp.where(hit_BN, order_BN, proposed.size), axis=1)
    rank_B = jnp.where(hit_BN.any(axis=1), rank_B, -1)
    level_D = jnp.arange(1, depth + 1, dtype=jnp.int32)
    at_BND = tree.valid_BN[:, :, None] & (tree.depth_BN[:, :, None] == level_D[None, None, :])
    nodes_BD = jnp.sum(at_BND, axis=1, dtype=jnp.int32)
    return jnp.concatenate((accepted_B[:, None], rank_B[:, None], nodes_BD), axis=1)


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
        """Counts the records of the slots that were kept, [tokens, R].

        A step of which fewer tokens were kept than it accepted drafts was cut: its last token was
        a draft, and levels beyond it count for nothing.
        """
        tokens = len(record_ER)
        begin = np.flatnonzero(record_ER[:, ACCEPTED] >= 0)
        kept = np.diff(np.append(begin, tokens))  # tokens of each step within the kept slots
        accepted = np.minimum(record_ER[begin, ACCEPTED], kept)
        nodes = record_ER[begin, LEVELS:]
        depth = nodes.shape[1]
        levels = np.where(record_ER[begin, ACCEPTED] < kept, depth, kept)
        nodes = nodes * (np.arange(1, depth + 1) <= levels[:, None])
        rank = record_ER[begin, RANK]
        return cls(
            tokens=tokens,
            steps=len(begin),
            accepted=int(accepted.sum()),
            proposed_depth=int((nodes > 0).sum()),
            proposed_nodes=int(nodes.sum()),
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
