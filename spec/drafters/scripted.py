"""A drafter that reads its drafts from a script: an oracle as good, or as bad, as one likes.

It bounds what any drafter of a shape can reach (all right), and drives every path of the
verification: right for some levels only, the right token as a later sibling, each row its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws, point_mass
from spec.tree import TokenTree
from spec.tree_shapes import TreeShape


class Script(NamedTuple):
    """What `ScriptedDrafter` says of each row; a batch may lose rows, so it is state."""

    script_BT: jax.Array
    right_B: jax.Array
    rank_BD: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes a given shape along a given continuation. Implements `Drafter`.

    At each level one child of the node on the right path holds the scripted token, its siblings
    (and everything off the path) other tokens.

    Attributes:
        script_BT: int32, the row's whole sequence, prompt included, by absolute position.
        right_B: int32, levels that are right before all is wrong: 0 never, depth always.
        rank_BD: int32 [B, depth], which sibling holds the right token at each level.
        vocab_size: size of the vocabulary; more than the widest sibling group.
        shape: static topology.
    """

    script_BT: jax.Array
    right_B: jax.Array
    rank_BD: jax.Array
    vocab_size: int = dataclasses.field(metadata={"static": True})
    shape: TreeShape = dataclasses.field(metadata={"static": True})

    @property
    def depth(self) -> int:
        """Depth of the shape."""
        return self.shape.depth[-1]

    @property
    def buckets(self) -> tuple[int, ...]:
        """The shape's size."""
        return (self.shape.size,)

    @property
    def children(self) -> frozenset[Children]:
        """Deterministic."""
        return frozenset({Children.TOP_K})

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> Script:
        """Copies the script: the state is the decoder's to consume."""
        return Script(*map(jnp.copy, (self.script_BT, self.right_B, self.rank_BD)))

    def propose(
        self, state: Script, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, Script]:
        """Fills the shape level by level."""
        parent, rank, depth = self.shape.parent, self.shape.rank, self.shape.depth
        on_path = [jnp.ones_like(view.active_B)]
        tokens = [view.root_B]
        last = state.script_BT.shape[1] - 1
        for i in range(1, self.shape.size):
            level = depth[i] - 1
            at_B1 = jnp.minimum(view.length_B + depth[i], last)[:, None]
            right_B = jnp.take_along_axis(state.script_BT, at_B1, axis=1)[:, 0]
            held_B = state.rank_BD[:, level] == rank[i]
            hit_B = on_path[parent[i]] & held_B & (level < state.right_B)
            on_path.append(hit_B)
            # Siblings stay distinct and wrong: right + 1, right + 2, ... by rank.
            tokens.append(jnp.where(hit_B, right_B, (right_B + 1 + rank[i]) % self.vocab_size))
        shape_BN = (view.root_B.shape[0], self.shape.size)

        def tile(values: tuple[int, ...]) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), shape_BN)

        token_BN = jnp.stack(tokens, axis=1)
        tree = TokenTree(token_BN, tile(parent), tile(depth), jnp.ones(shape_BN, jnp.bool_))
        return tree, point_mass(tree), state

    def observe(self, state: Script, step: Step) -> Script:
        """Nothing to follow: a position is all it needs."""
        return state
