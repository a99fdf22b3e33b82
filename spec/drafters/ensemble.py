"""Several drafters, one tree: the merge-based construction of SpecInfer section 3."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec.drafters.protocol import Drafter, Step, View
from spec.draws import Children, Draws, merge_drawn
from spec.tree import TokenTree


class EnsembleState(NamedTuple):
    """The members' states, and for each the own node behind every node of the last tree."""

    members: tuple[Any, ...]
    own_BN: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleDrafter:
    """Merges what its members propose; nothing is truncated. Implements `Drafter`.

    Attributes:
        members: at least two drafters; trials are made in their order.
    """

    members: tuple[Drafter, ...]

    @property
    def depth(self) -> int:
        """Of the deepest member."""
        return max(member.depth for member in self.members)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Root alone, each member's largest tree, all of them together."""
        sizes = [member.buckets[-1] for member in self.members]
        return tuple(sorted({1, *sizes, 1 + sum(size - 1 for size in sizes)}))

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
        merged, draws, slot_BN = merge_drawn(trees, drawn)
        own_BN, base = [], 0
        for tree in trees:
            slots = jnp.concatenate([slot_BN[:, :1], slot_BN[:, base + 1 : base + tree.size]], 1)
            own_BN.append(_invert(slots, merged.size))
            base += tree.size - 1
        return merged, draws, EnsembleState(tuple(states), tuple(own_BN))

    def observe(self, state: EnsembleState, step: Step) -> EnsembleState:
        """Tells each member what was accepted, in its own node ids; a foreign node is its N."""
        states = []
        for member, own, own_BN in zip(self.members, state.members, state.own_BN, strict=True):
            padded = jnp.pad(own_BN, ((0, 0), (0, 1)), constant_values=member.buckets[-1])
            node_BP = jnp.take_along_axis(padded, step.node_BP, axis=1)
            # Members see paths of their own depth; what is longer is no draft of theirs.
            states.append(member.observe(own, dataclasses.replace(step, node_BP=node_BP)))
        return EnsembleState(tuple(states), state.own_BN)


def _invert(slot_BN: jax.Array, size: int) -> jax.Array:
    """Returns for each merged slot the first own node there, else the own tree's N."""
    B, N = slot_BN.shape
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    node_N = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    return jnp.full((B, size), N, jnp.int32).at[row_B1, slot_BN].min(node_N, mode="drop")
