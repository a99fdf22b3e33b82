"""Multi-step speculative sampling and its relatives: trials at a node, then one level down.

SpecInfer algorithm 2 (VerifyStochastic) for i.i.d. draws; Sequoia (arXiv 2402.12374) and recursive
speculative decoding (arXiv 2402.14160) for draws without replacement. One trial function knows
how each kind of draw is tried, so drafts of several kinds and drafters mix.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from spec.draws import Children, Draws, Kind
from spec.sampling import Use, draw, fold
from spec.tree import TokenTree
from spec.verify.rule import Accepted, Keys, Law, Target, normalise, pick, ratio
from spec.verify.walk import walk


class NodeLaw(NamedTuple):
    """What happens at one node.

    Attributes:
        accept_BM: probability that a draw is accepted given that the node's earlier ones were
            not; 0 for draws under other nodes.
        residual_BV: what is emitted if none is accepted.
    """

    accept_BM: jax.Array
    residual_BV: jax.Array


def law_at(p_BV: jax.Array, node_B: jax.Array, tree: TokenTree, draws: Draws) -> NodeLaw:
    """Tries the draws under one node, in their order.

    With residual r (at first p) and a draw x ~ q: accept with min(1, r(x)/q(x)), else
    r <- norm(max(0, r - q)). A point mass has q = one-hot.

    Args:
        p_BV: the target's processed distribution after the node.
        node_B: int32.
        tree: the drafts.
        draws: in trial order.
    """
    mine_BM = (draws.parent_BM == node_B[:, None]) & (draws.kind_BM != Kind.PADDING.value)
    if not mine_BM.shape[1]:
        return NodeLaw(jnp.zeros(mine_BM.shape, p_BV.dtype), p_BV)
    turn_BM = jnp.cumsum(mine_BM, axis=1, dtype=jnp.int32) - 1
    token_BM = jnp.take_along_axis(tree.token_BN, draws.child_BM, axis=1)

    def trial(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        r_BV, accept_BM = carry
        now_BM = mine_BM & (turn_BM == turn)
        m_B = jnp.argmax(now_BM, axis=1).astype(jnp.int32)
        x_B = pick(token_BM, m_B)
        q_BV = proposal(draws, token_BM, mine_BM & (turn_BM < turn), m_B, x_B, r_BV)
        a_B = jnp.where(now_BM.any(axis=1), ratio(pick(r_BV, x_B), pick(q_BV, x_B)), 0)
        left_BV = normalise(jnp.maximum(r_BV - q_BV, 0), r_BV)
        r_BV = jnp.where(now_BM.any(axis=1)[:, None], left_BV, r_BV)
        return r_BV, jnp.where(now_BM, a_B[:, None], accept_BM)

    trials = jnp.max(jnp.sum(mine_BM, axis=1, dtype=jnp.int32))
    zero_BM = jnp.zeros(mine_BM.shape, p_BV.dtype)
    r_BV, accept_BM = jax.lax.fori_loop(0, trials, trial, (p_BV, zero_BM))
    return NodeLaw(accept_BM, r_BV)


def proposal(
    draws: Draws,
    token_BM: jax.Array,
    earlier_BM: jax.Array,
    m_B: jax.Array,
    x_B: jax.Array,
    like_BV: jax.Array,
) -> jax.Array:
    """Returns the distribution that draw m was made from, [B, V], given the node's earlier draws.

    Args:
        draws: all draws.
        token_BM: their tokens.
        earlier_BM: bool, the node's draws before m.
        m_B: int32, which draw.
        x_B: int32, its token.
        like_BV: an array of the wanted shape and dtype.
    """
    V = like_BV.shape[1]
    one_hot_BV = jax.nn.one_hot(x_B, V, dtype=like_BV.dtype)
    if not draws.q_BQV.shape[1]:
        return one_hot_BV
    kind_B, row_B = pick(draws.kind_BM, m_B), pick(draws.row_BM, m_B)
    q_BV = pick(draws.q_BQV, row_B).astype(like_BV.dtype)
    # Without replacement: tokens drawn before from the same row are gone.
    gone_BM = earlier_BM & (draws.row_BM == row_B[:, None])
    gone_BM &= (draws.kind_BM == Kind.WITHOUT_REPLACEMENT.value) & (
        kind_B == Kind.WITHOUT_REPLACEMENT.value
    )[:, None]
    row_B1 = jnp.arange(q_BV.shape[0], dtype=jnp.int32)[:, None]
    left_BV = q_BV.at[row_B1, jnp.where(gone_BM, token_BM, V)].set(0, mode="drop")
    q_BV = jnp.where(gone_BM.any(axis=1)[:, None], normalise(left_BV, left_BV), q_BV)
    return jnp.where((kind_B == Kind.POINT_MASS.value)[:, None], one_hot_BV, q_BV)


@dataclasses.dataclass(frozen=True)
class TopDown:
    """Tries a node's draws one after the other and descends into the first accepted.

    Implements `Rule`.

    Attributes:
        name: see `Rule`.
        admits: see `Rule`.
        shuffle: try draws in random order, as SpecInfer does; exact for i.i.d. draws only.
    """

    name: str
    admits: frozenset[Children]
    shuffle: bool

    @classmethod
    def multi_step(cls) -> Self:
        """MSS: i.i.d. draws, of any drafters, in random order (SpecInfer algorithm 2)."""
        return cls("mss", frozenset({Children.IID, Children.MERGED}), True)

    @classmethod
    def without_replacement(cls) -> Self:
        """Draw order, q zeroed and renormalised."""
        admits = frozenset({Children.WITHOUT_REPLACEMENT, Children.MERGED})
        return cls("without_replacement", admits, False)

    @classmethod
    def greedy_plus_one(cls) -> Self:
        """The random child first, then the k - 1 best as point masses."""
        return cls("greedy_plus_one", frozenset({Children.GREEDY_PLUS_ONE}), False)

    @classmethod
    def any_order(cls) -> Self:
        """Draw order, every draw by its own kind: for merges of different drafters."""
        wrong = {Children.RERANKED, Children.FUSED}
        return cls("top_down", frozenset(Children) - wrong, False)

    def order(self, draws: Draws, key_B: jax.Array) -> Draws:
        """Shuffles the trials if the rule does; a uniform order of all is one at every node."""
        if not self.shuffle:
            return draws
        M = draws.child_BM.shape[1]
        weight_BM = jax.vmap(lambda key: jax.random.uniform(key, (M,)))(key_B)
        order_BM = jnp.argsort(weight_BM, axis=1)

        def move(array_BM: jax.Array) -> jax.Array:
            return jnp.take_along_axis(array_BM, order_BM, axis=1)

        return Draws(
            move(draws.child_BM),
            move(draws.parent_BM),
            move(draws.kind_BM),
            move(draws.row_BM),
            draws.q_BQV,
        )

    def law(self, p_BNV: jax.Array, tree: TokenTree, draws: Draws) -> Law:
        """See `Rule.law`: `law_at` at every node, then the probability of getting there."""
        B, N, _ = p_BNV.shape

        def at(node: jax.Array) -> NodeLaw:
            node_B = jnp.broadcast_to(node, (B,))
            return law_at(pick(p_BNV, node_B), node_B, tree, draws)

        accept_NBM, bonus_NBV = jax.lax.map(at, jnp.arange(N, dtype=jnp.int32))
        row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]

        def leave(
            node: jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            reach_BN, stop_BN = carry
            a_BM = accept_NBM[node]
            fail_BM = jnp.cumprod(1 - a_BM, axis=1)
            before_BM = jnp.pad(fail_BM, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
            here_B1 = reach_BN[:, node][:, None]
            reach_BN = reach_BN.at[row_B1, draws.child_BM].add(here_B1 * before_BM * a_BM)
            last_B = fail_BM[:, -1] if fail_BM.shape[1] else jnp.ones(B, p_BNV.dtype)
            return reach_BN, stop_BN.at[:, node].set(here_B1[:, 0] * last_B)

        zero_BN = jnp.zeros((B, N), p_BNV.dtype)
        _, stop_BN = jax.lax.fori_loop(0, N, leave, (zero_BN.at[:, 0].set(1), zero_BN))
        return Law(stop_BN, bonus_NBV.swapaxes(0, 1))

    def sample(
        self, p_at: Target, tree: TokenTree, draws: Draws, keys: Keys, path_size: int
    ) -> Accepted:
        """See `Rule.sample`; visits the nodes of the path only."""
        coin_B, bonus_key_B = keys.step(Use.ACCEPT), keys.step(Use.BONUS)
        M = draws.child_BM.shape[1]

        def visit(depth: jax.Array, node_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            here = law_at(p_at(node_B), node_B, tree, draws)
            u_BM = jax.vmap(lambda key: jax.random.uniform(key, (M,), here.accept_BM.dtype))(
                fold(coin_B, depth)
            )
            taken_BM = u_BM < here.accept_BM
            first_B = (
                jnp.argmax(taken_BM, axis=1).astype(jnp.int32) if M else jnp.zeros_like(node_B)
            )
            child_B = pick(draws.child_BM, first_B) if M else first_B
            child_B = jnp.where(taken_BM.any(axis=1), child_B, -1)
            return child_B, draw(bonus_key_B, here.residual_BV)

        return walk(visit, tree, path_size)
