"""Several drafters, one tree: the merge-based construction of SpecInfer section 3."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec.drafters.protocol import Drafter, Step, View
from spec.draws import Children, Draws, drop_invalid, merge_drawn
from spec.tree import TokenTree


class EnsembleState(NamedTuple):
    """The members' states, and for each the own node behind every node of the last tree."""

    members: tuple[Any, ...]
    own_BN: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleDrafter:
    """Merges what its members propose. Implements `Drafter`.

    Nothing is truncated without a budget. With one, a member whose nodes would not fit beside
    those of the members before it is left out of the step, whole. Sampled trees count with all
    their slots, so what is checked never depends on what was drawn, and every rule stays exact.
    The use: a lookup that is sure of a long copy takes all nodes, a model fills up the rest of the
    time. (SuffixDecoding's hybrid, arXiv 2411.04975, asks one or the other; here the model drafts
    in any case, so that its cache keeps up: a budget saves the target's time only.)

    Attributes:
        members: at least two drafters; trials are made in their order.
        budget: most nodes of a step, root included, before equal ones are merged; None for all.
    """

    members: tuple[Drafter, ...]
    budget: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses a budget that a member could never keep."""
        if self.budget is None:
            return
        largest = max(member.buckets[-1] for member in self.members)
        if self.budget < largest:
            raise ValueError(
                f"budget {self.budget} is less than the {largest} nodes of one member: give at "
                "least as many, or a smaller member."
            )

    @property
    def depth(self) -> int:
        """Of the deepest member."""
        return max(member.depth for member in self.members)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Root alone, each member's largest tree, the budget or all of them together."""
        sizes = [member.buckets[-1] for member in self.members]
        most = 1 + sum(size - 1 for size in sizes)
        return tuple(sorted({1, *sizes, most if self.budget is None else min(most, self.budget)}))

    @property
    def children(self) -> frozenset[Children]:
        """Those of all members, merged."""
        return frozenset({Children.MERGED}).union(*[member.children for member in self.members])

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> EnsembleState:
        """Starts every member."""
        states = [
            m.init(token_BT, length_B, hidden_BTID, capacity, path_size) for m in self.members
        ]
        empty = jnp.zeros((token_BT.shape[0], self.buckets[-1]), jnp.int32)
        return EnsembleState(tuple(states), (empty,) * len(self.members))

    def propose(
        self, state: EnsembleState, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, EnsembleState]:
        """Merges the members' trees and keeps every draw."""
        trees, drawn, states = [], [], []
        for i, (member, own) in enumerate(zip(self.members, state.members, strict=True)):
            member_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, i)
            tree, draws, new = member.propose(own, view, member_key_B)
            trees.append(tree)
            drawn.append(draws)
            states.append(new)
        if self.budget is not None:
            trees, drawn = self._within(self.budget, trees, drawn)
        merged, draws, own_BN = combine(trees, drawn, self.buckets[-1])
        return merged, draws, EnsembleState(tuple(states), own_BN)

    def _within(
        self, budget: int, trees: Sequence[TokenTree], drawn: Sequence[Draws]
    ) -> tuple[list[TokenTree], list[Draws]]:
        """Empties the trees that do not fit, and makes padding of their draws."""
        B = trees[0].token_BN.shape[0]
        used_B = jnp.ones(B, jnp.int32)
        kept: list[TokenTree] = []
        for member, tree in zip(self.members, trees, strict=True):
            size_B = jnp.full(B, tree.size - 1, jnp.int32)
            if member.children <= {Children.TOP_K, Children.MERGED}:
                size_B = jnp.sum(tree.valid_BN, axis=1, dtype=jnp.int32) - 1
            fits_B = used_B + size_B <= budget
            used_B += jnp.where(fits_B, size_B, 0)
            root_N = jnp.arange(tree.size, dtype=jnp.int32) == 0
            valid_BN = tree.valid_BN & (fits_B[:, None] | root_N[None, :])
            kept.append(dataclasses.replace(tree, valid_BN=valid_BN))
        return kept, [drop_invalid(*pair) for pair in zip(drawn, kept, strict=True)]

    def observe(self, state: EnsembleState, step: Step) -> EnsembleState:
        """Tells each member what was accepted, in its own node ids; a foreign node is its N."""
        states = []
        for member, own, own_BN in zip(self.members, state.members, state.own_BN, strict=True):
            # Members see paths of their own depth; what is longer is no draft of theirs.
            states.append(member.observe(own, own_step(step, own_BN, member.buckets[-1])))
        return EnsembleState(tuple(states), state.own_BN)


def combine(
    trees: Sequence[TokenTree], drawn: Sequence[Draws], size: int
) -> tuple[TokenTree, Draws, tuple[jax.Array, ...]]:
    """Merges trees of equal roots into one of `size` slots, which must hold all valid nodes.

    Returns:
        The union, all draws, and for each tree int32 [B, size]: its own node behind every node of
        the union, its N where there is none.
    """
    merged, draws, slot_BN = merge_drawn(trees, drawn)
    if merged.size > size:
        merged, draws = _first(merged, draws, size)
    own_BN, base = [], 0
    for tree in trees:
        slots = jnp.concatenate([slot_BN[:, :1], slot_BN[:, base + 1 : base + tree.size]], 1)
        own_BN.append(_invert(slots, merged.size))
        base += tree.size - 1
    return merged, draws, tuple(own_BN)


def own_step(step: Step, own_BN: jax.Array, size: int) -> Step:
    """Returns a step in the node ids of one tree of a union; a foreign node is its `size`."""
    padded = jnp.pad(own_BN, ((0, 0), (0, 1)), constant_values=size)
    return dataclasses.replace(step, node_BP=jnp.take_along_axis(padded, step.node_BP, axis=1))


def _first(tree: TokenTree, draws: Draws, size: int) -> tuple[TokenTree, Draws]:
    """Cuts off slots that are padding; the draws of padding point at the last slot."""
    child_BM, parent_BM = (
        jnp.minimum(node_BM, size - 1) for node_BM in (draws.child_BM, draws.parent_BM)
    )
    return tree.first(size), dataclasses.replace(draws, child_BM=child_BM, parent_BM=parent_BM)


def _invert(slot_BN: jax.Array, size: int) -> jax.Array:
    """Returns for each merged slot the first own node there, else the own tree's N."""
    B, N = slot_BN.shape
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    node_N = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    return jnp.full((B, size), N, jnp.int32).at[row_B1, slot_BN].min(node_N, mode="drop")
