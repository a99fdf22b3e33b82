"""Greedy verification: the target's best token decides, by parent pointers."""

import dataclasses

import jax
import jax.numpy as jnp

from spec.draws import Children, Draws
from spec.sampling import best_token
from spec.tree import TokenTree, ancestor_mask
from spec.verify.rule import Accepted, Keys, Law, Target, path_to, pick


@dataclasses.dataclass(frozen=True)
class Greedy:
    """SpecInfer algorithm 2, VerifyGreedy. Implements `Rule`, for any tree.

    Walks from the root to the child that holds the target's best token, as long as there is one.
    A node is accepted iff it and all its ancestors hold the best token of their parents: parent
    pointers decide, never slot positions. `accept` does it for all nodes at once and is what
    greedy decoding runs; `law` and `sample` say the same in the words of the other rules.
    """

    name: str = "greedy"
    admits: frozenset[Children] = frozenset(Children)

    def accept(
        self, tree: TokenTree, mask_BNN: jax.Array, best_BN: jax.Array, path_size: int
    ) -> Accepted:
        """Returns the accepted path.

        Args:
            tree: the drafts.
            mask_BNN: its ancestor mask.
            best_BN: int32, the target's best token after every node.
            path_size: P, at least the tree's depth + 1.
        """
        index_N = jnp.arange(tree.size, dtype=jnp.int32)[None, :]
        wanted_BN = jnp.take_along_axis(best_BN, tree.parent_BN, axis=1)
        match_BN = (tree.token_BN == wanted_BN) | (index_N == 0)
        broken_BN = jnp.any(mask_BNN & ~match_BN[:, None, :], axis=2)
        depth_BN = jnp.where(tree.valid_BN & ~broken_BN, tree.depth_BN, -1)
        # Equal siblings (an unmerged tree) give several deepest nodes; argmax takes the first.
        leaf_B = jnp.argmax(depth_BN, axis=1).astype(jnp.int32)
        node_BP = path_to(tree, mask_BNN, leaf_B, path_size)
        return Accepted(node_BP, pick(tree.depth_BN, leaf_B) + 1, pick(best_BN, leaf_B))

    def order(self, draws: Draws, key_B: jax.Array) -> Draws:
        """Any order will do."""
        return draws

    def law(self, p_BNV: jax.Array, tree: TokenTree, draws: Draws) -> Law:
        """One outcome, with probability 1."""
        best_BN = best_token(p_BNV)
        done = self.accept(tree, ancestor_mask(tree), best_BN, tree.size)
        leaf_B = pick(done.node_BP, done.count_B - 1)
        stop_BN = jax.nn.one_hot(leaf_B, tree.size, dtype=p_BNV.dtype)
        return Law(stop_BN, jax.nn.one_hot(best_BN, p_BNV.shape[2], dtype=p_BNV.dtype))

    def sample(
        self, p_at: Target, tree: TokenTree, draws: Draws, keys: Keys, path_size: int
    ) -> Accepted:
        """See `accept`."""
        B, N = tree.token_BN.shape
        p_BNV = jnp.stack([p_at(jnp.full(B, node, jnp.int32)) for node in range(N)], axis=1)
        return self.accept(tree, ancestor_mask(tree), best_token(p_BNV), path_size)
