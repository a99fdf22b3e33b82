"""Traversal verification of trees (arXiv 2505.12398): leaf to root, sibling after sibling.

A draft that would be rejected on its own may still be kept with its descendants, so no fewer
tokens are accepted in expectation than top-down. On a chain it is block verification.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec.draws import Children, Draws, Kind, at_least_one
from spec.sampling import Use, draw, fold, uniform
from spec.tree import TokenTree, ancestor_mask
from spec.verify.rule import Accepted, Keys, Law, Target, normalise, path_to, pick, ratio
from spec.verify.top_down import proposal


class _State(NamedTuple):
    """A depth-first visit of each row's tree; the stack is indexed by depth.

    `w` is the weight with which a node on the stack would be accepted, `r` the distribution after
    it, `turn` how many of its draws were tried.
    """

    at_B: jax.Array
    w_BN: jax.Array
    r_BNV: jax.Array
    turn_BN: jax.Array
    done_B: jax.Array
    record: tuple[jax.Array, ...]


# (node_B, leaving_B, w_B, r_BV, record) -> accepted_B and the new record.
_Leave = Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]


def _traverse(
    p_at: Target,
    tree: TokenTree,
    draws: Draws,
    depth: int,
    leave: _Leave,
    record: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Visits nodes in depth-first order and asks `leave` as each is left, until it accepts.

    Entering child x of node u: w = min(w_u r_u(x) / q(x), 1). Leaving it rejected: with
    D = (w_u r_u - q)+ and S = sum D, w_u <- S / (S + 1 - w_u), r_u <- D / S.
    """
    B = tree.token_BN.shape[0]
    draws = at_least_one(draws)
    row_B = jnp.arange(B, dtype=jnp.int32)
    live_BM = draws.kind_BM != Kind.PADDING.value
    token_BM = jnp.take_along_axis(tree.token_BN, draws.child_BM, axis=1)

    def siblings(node_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine_BM = live_BM & (draws.parent_BM == node_B[:, None])
        return mine_BM, jnp.cumsum(mine_BM, axis=1, dtype=jnp.int32) - 1

    def step(state: _State) -> _State:
        at_B = state.at_B
        deep_B = pick(tree.depth_BN, at_B)
        w_B, r_BV = state.w_BN[row_B, deep_B], state.r_BNV[row_B, deep_B]
        mine_BM, turn_BM = siblings(at_B)
        next_BM = mine_BM & (turn_BM == state.turn_BN[row_B, deep_B][:, None])
        enter_B = next_BM.any(axis=1) & ~state.done_B
        leaving_B = ~next_BM.any(axis=1) & ~state.done_B
        accepted_B, record = leave(at_B, leaving_B, w_B, r_BV, state.record)
        back_B = leaving_B & ~accepted_B & (at_B > 0)

        # The draw in question: the one to enter, or the one through which we came here.
        came_BM = live_BM & (draws.child_BM == at_B[:, None])
        m_B = jnp.argmax(jnp.where(enter_B[:, None], next_BM, came_BM), axis=1).astype(jnp.int32)
        u_B = jnp.where(enter_B, at_B, pick(tree.parent_BN, at_B))
        up_B = pick(tree.depth_BN, u_B)
        w_up_B, r_up_BV = state.w_BN[row_B, up_B], state.r_BNV[row_B, up_B]
        around_BM, order_BM = siblings(u_B)
        earlier_BM = around_BM & (order_BM < pick(order_BM, m_B)[:, None])
        x_B = pick(token_BM, m_B)
        q_BV = proposal(draws, token_BM, earlier_BM, m_B, x_B, r_up_BV)

        child_B = pick(draws.child_BM, m_B)
        w_child_B = ratio(w_up_B * pick(r_up_BV, x_B), pick(q_BV, x_B))
        left_BV = jnp.maximum(w_up_B[:, None] * r_up_BV - q_BV, 0)
        s_B = left_BV.sum(-1)
        below_B = s_B + 1 - w_up_B
        w_left_B = jnp.where(below_B > 0, s_B / jnp.where(below_B > 0, below_B, 1), 1)

        # Entering writes the child's level of the stack, going back the parent's.
        moved_B = enter_B | back_B
        level_B = jnp.where(moved_B, jnp.where(enter_B, up_B + 1, up_B), depth + 1)
        w_new_B = jnp.where(enter_B, w_child_B, w_left_B)
        r_new_BV = jax.lax.cond(
            enter_B.any(),
            lambda: jnp.where(enter_B[:, None], p_at(child_B), normalise(left_BV, r_up_BV)),
            lambda: normalise(left_BV, r_up_BV),
        )
        turn_B = jnp.where(enter_B, 0, state.turn_BN[row_B, up_B] + 1)
        return _State(
            jnp.where(enter_B, child_B, jnp.where(back_B, u_B, at_B)),
            state.w_BN.at[row_B, level_B].set(w_new_B, mode="drop"),
            state.r_BNV.at[row_B, level_B].set(r_new_BV, mode="drop"),
            state.turn_BN.at[row_B, level_B].set(turn_B, mode="drop"),
            state.done_B | (leaving_B & ~back_B),
            record,
        )

    zero_B = jnp.zeros(B, jnp.int32)
    p_root_BV = p_at(zero_B)
    begin = _State(
        zero_B,
        jnp.ones((B, depth + 1), p_root_BV.dtype),
        jnp.zeros((B, depth + 1, p_root_BV.shape[1]), p_root_BV.dtype).at[:, 0].set(p_root_BV),
        jnp.zeros((B, depth + 1), jnp.int32),
        jnp.zeros(B, jnp.bool_),
        record,
    )
    return jax.lax.while_loop(lambda state: ~state.done_B.all(), step, begin).record


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Implements `Rule`, for trees in which every node holds one draw."""

    name: str = "traversal"
    admits: frozenset[Children] = frozenset(
        {
            Children.IID,
            Children.WITHOUT_REPLACEMENT,
            Children.GREEDY_PLUS_ONE,
            Children.TOP_K,
        }
    )

    def order(self, draws: Draws, key_B: jax.Array) -> Draws:
        """Draw order."""
        return draws

    def law(self, p_BNV: jax.Array, tree: TokenTree, draws: Draws) -> Law:
        """See `Rule.law`: the whole traversal, every node rejected, weights recorded."""
        B, N, _ = p_BNV.shape
        row_B = jnp.arange(B, dtype=jnp.int32)

        def leave(
            node_B: jax.Array,
            leaving_B: jax.Array,
            w_B: jax.Array,
            r_BV: jax.Array,
            record: tuple[jax.Array, ...],
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            stop_BN, bonus_BNV, left_B = record
            w_B = jnp.where(node_B == 0, 1, w_B)  # the root takes what is left
            at_B = jnp.where(leaving_B, node_B, N)
            stop_BN = stop_BN.at[row_B, at_B].set(left_B * w_B, mode="drop")
            bonus_BNV = bonus_BNV.at[row_B, at_B].set(r_BV, mode="drop")
            left_B = jnp.where(leaving_B, left_B * (1 - w_B), left_B)
            return jnp.zeros_like(leaving_B), (stop_BN, bonus_BNV, left_B)

        record = (jnp.zeros((B, N), p_BNV.dtype), p_BNV, jnp.ones(B, p_BNV.dtype))
        stop_BN, bonus_BNV, _ = _traverse(
            lambda node_B: pick(p_BNV, node_B), tree, draws, N - 1, leave, record
        )
        return Law(stop_BN, bonus_BNV)

    def sample(
        self, p_at: Target, tree: TokenTree, draws: Draws, keys: Keys, path_size: int
    ) -> Accepted:
        """See `Rule.sample`; stops at the first node that is accepted."""
        coin_B = keys.step(Use.ACCEPT)

        def leave(
            node_B: jax.Array,
            leaving_B: jax.Array,
            w_B: jax.Array,
            r_BV: jax.Array,
            record: tuple[jax.Array, ...],
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            leaf_B, residual_BV = record
            accepted_B = uniform(fold(coin_B, node_B), w_B.dtype) < w_B
            accepted_B |= node_B == 0
            now_B = leaving_B & accepted_B
            leaf_B = jnp.where(now_B, node_B, leaf_B)
            return accepted_B, (leaf_B, jnp.where(now_B[:, None], r_BV, residual_BV))

        zero_B = jnp.zeros(tree.token_BN.shape[0], jnp.int32)
        record = (zero_B, jnp.zeros_like(p_at(zero_B)))
        leaf_B, residual_BV = _traverse(p_at, tree, draws, path_size - 1, leave, record)
        node_BP = path_to(tree, ancestor_mask(tree), leaf_B, path_size)
        bonus_B = draw(keys.step(Use.BONUS), residual_BV)
        return Accepted(node_BP, pick(tree.depth_BN, leaf_B) + 1, bonus_B)
