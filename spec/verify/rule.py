"""The interface of verification rules, and what they share.

A rule has three parts:

* `order(draws, key_B)`: in which order the trials are made; the identity except for MSS.
* `law(p_BNV, tree, draws)`: the exact distribution of the outcome, no randomness: where the path
  ends, and what follows. This is what tests enumerate.
* `sample(p_at, ...)`: one outcome of that law, at the cost of the nodes that it visits. This is
  what decoding runs and what tests check statistically.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from spec.draws import Children, Draws
from spec.sampling import fold
from spec.tree import TokenTree

# node_B (int32) -> the target's processed distribution after that node, [B, V].
Target = Callable[[jax.Array], jax.Array]


class Accepted(NamedTuple):
    """The accepted path of each row, before end-of-sequence and budget cut it.

    Attributes:
        node_BP: int32 slots of the root and the accepted drafts; N past the path's end.
        count_B: int32 nodes on the path, at least 1: tokens that the step emits.
        bonus_B: int32 token that the target puts after the path.
    """

    node_BP: jax.Array
    count_B: jax.Array
    bonus_B: jax.Array


class Law(NamedTuple):
    """Exact distribution of a rule's outcome, given the tree.

    Attributes:
        stop_BN: probability that the accepted path ends at each node; sums to 1 over N.
        bonus_BNV: distribution of the token after the path, given that it ends there.
    """

    stop_BN: jax.Array
    bonus_BNV: jax.Array


class Keys(NamedTuple):
    """Where a rule's randomness comes from.

    Attributes:
        row_B: one key a row, from (seed, request).
        position_B: int32 absolute position of the root.
    """

    row_B: jax.Array
    position_B: jax.Array

    def step(self, use: int) -> jax.Array:
        """Returns the row's key for one use within this step."""
        return fold(self.row_B, use, self.position_B)


class Rule(Protocol):
    """See the module. Rules are hashable and static under jit.

    Attributes:
        name: as in `RULES`.
        admits: the ways of choosing children for which the rule is exact.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def admits(self) -> frozenset[Children]:
        """See the class."""
        ...

    def order(self, draws: Draws, key_B: jax.Array) -> Draws:
        """Returns the draws in trial order."""
        ...

    def law(self, p_BNV: jax.Array, tree: TokenTree, draws: Draws) -> Law:
        """Returns the outcome's distribution for draws in trial order."""
        ...

    def sample(
        self, p_at: Target, tree: TokenTree, draws: Draws, keys: Keys, path_size: int
    ) -> Accepted:
        """Draws an outcome of `law`; `path_size` = P is at least the tree's depth + 1."""
        ...


_WHY = {
    Children.TOP_K: "top-k children are point masses: the ratio p/q accepts them too often",
    Children.IID: "draws with replacement must be tried with q unchanged, one trial a draw",
    Children.WITHOUT_REPLACEMENT: "draws without replacement must be tried in draw order, with q "
    "zeroed and renormalised",
    Children.GREEDY_PLUS_ONE: "the random child has its own q and comes before the fixed ones",
    Children.RERANKED: "re-ranked samples no longer follow q",
    Children.FUSED: "equal draws fused into one trial are tried too seldom",
    Children.MERGED: "a node that holds several draws would be visited more than once",
}


def check_fit(rule: Rule, children: frozenset[Children]) -> None:
    """Refuses a rule that is not exact for such trees.

    Raises:
        ValueError: naming the rule, the children, the reason and a rule that fits.
    """
    for kind in sorted(children - rule.admits, key=lambda kind: kind.value):
        raise ValueError(
            f"Rule {rule.name!r} is not exact for {kind.value!r} children: {_WHY[kind]}. Use a "
            "rule that admits them ('naive' admits all)."
        )


def path_to(tree: TokenTree, mask_BNN: jax.Array, leaf_B: jax.Array, path_size: int) -> jax.Array:
    """Returns int32 [B, P]: slots from the root to `leaf_B`, then N."""
    above_BN = jnp.take_along_axis(mask_BNN, leaf_B[:, None, None], axis=1)[:, 0]
    step_P = jnp.arange(path_size, dtype=jnp.int32)
    at_BPN = above_BN[:, None, :] & (tree.depth_BN[:, None, :] == step_P[None, :, None])
    index_N = jnp.arange(tree.size, dtype=jnp.int32)
    node_BP = jnp.sum(jnp.where(at_BPN, index_N[None, None, :], 0), axis=2, dtype=jnp.int32)
    return jnp.where(at_BPN.any(axis=2), node_BP, tree.size)


def pick(array_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """Returns array[b, index[b]] of every row: [B, X, ...] -> [B, ...]."""
    index = index_B.reshape(-1, *[1] * (array_BX.ndim - 1))
    return jnp.take_along_axis(array_BX, index, axis=1)[:, 0]


def normalise(weight_BV: jax.Array, otherwise_BV: jax.Array) -> jax.Array:
    """Divides by the sum; a row without mass (p = q up to rounding) takes `otherwise`."""
    total_B1 = weight_BV.sum(-1, keepdims=True)
    ok_B1 = total_B1 > 0
    return jnp.where(ok_B1, weight_BV / jnp.where(ok_B1, total_B1, 1), otherwise_BV)


def ratio(p_B: jax.Array, q_B: jax.Array) -> jax.Array:
    """Returns min(1, p / q); a token that q cannot draw is accepted iff p allows it."""
    safe_B = jnp.where(q_B > 0, q_B, 1)
    return jnp.where(q_B > 0, jnp.minimum(p_B / safe_B, 1), (p_B > 0).astype(p_B.dtype))
