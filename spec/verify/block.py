"""Block verification of chains (Sun et al. 2024, arXiv 2403.10444): the longest prefix jointly."""

import dataclasses

import jax
import jax.numpy as jnp

from spec.draws import Children, Draws
from spec.sampling import Use, draw, fold
from spec.tree import TokenTree
from spec.verify.rule import Accepted, Keys, Law, Target, normalise, pick


@dataclasses.dataclass(frozen=True)
class Block:
    """Accepts the longest prefix whose joint test succeeds. Implements `Rule`, for chains.

    With P_i, Q_i the target's and drafter's distributions of draft i = 1..g:
    w_0 = 1, w_i = min(w_{i-1} P_i(x_i) / Q_i(x_i), 1);
    S_i = sum (w_i P_{i+1} - Q_{i+1})+, h_i = S_i / (S_i + 1 - w_i) for i < g, h_g = w_g;
    the path ends at the largest i with u_i < h_i, the bonus follows norm (w_i P_{i+1} - Q_{i+1})+
    (P_{g+1} at the end). Never accepts fewer tokens in expectation than trial by trial.
    """

    name: str = "block"
    admits: frozenset[Children] = frozenset({Children.IID})

    def order(self, draws: Draws, key_B: jax.Array) -> Draws:
        """The chain's own."""
        return draws

    def law(self, p_BNV: jax.Array, tree: TokenTree, draws: Draws) -> Law:
        """See `Rule.law`.

        Raises:
            ValueError: if the tree is not a chain of one draw a node.
        """
        h_BN, bonus_BNV = self._tests(p_BNV, tree, draws)
        later_BN = jnp.cumprod((1 - h_BN)[:, ::-1], axis=1)[:, ::-1]
        after_BN = jnp.pad(later_BN, ((0, 0), (0, 1)), constant_values=1)[:, 1:]
        return Law(h_BN * after_BN, bonus_BNV)

    def sample(
        self, p_at: Target, tree: TokenTree, draws: Draws, keys: Keys, path_size: int
    ) -> Accepted:
        """See `Rule.sample`; needs the target's distribution at every node."""
        B, N = tree.token_BN.shape
        p_BNV = jnp.stack([p_at(jnp.full(B, node, jnp.int32)) for node in range(N)], axis=1)
        h_BN, bonus_BNV = self._tests(p_BNV, tree, draws)
        coins = [fold(keys.step(Use.ACCEPT), node) for node in range(N)]
        u_BN = jnp.stack(
            [jax.vmap(lambda key: jax.random.uniform(key, dtype=h_BN.dtype))(c) for c in coins], 1
        )
        index_N = jnp.arange(N, dtype=jnp.int32)[None, :]
        leaf_B = jnp.max(jnp.where(u_BN < h_BN, index_N, 0), axis=1)
        step_P = jnp.arange(path_size, dtype=jnp.int32)[None, :]
        node_BP = jnp.where(step_P <= leaf_B[:, None], step_P, N)
        return Accepted(node_BP, leaf_B + 1, draw(keys.step(Use.BONUS), pick(bonus_BNV, leaf_B)))

    def _tests(
        self, p_BNV: jax.Array, tree: TokenTree, draws: Draws
    ) -> tuple[jax.Array, jax.Array]:
        """Returns h_BN (0 past the chain's end) and the distribution after each node."""
        B, N, V = p_BNV.shape
        if draws.child_BM.shape[1] != draws.q_BQV.shape[1] or draws.q_BQV.shape[1] < N - 1:
            raise ValueError(
                f"Rule 'block' verifies chains with one i.i.d. draw and one row of q a draft: got "
                f"{N - 1} drafts, {draws.child_BM.shape[1]} draws, {draws.q_BQV.shape[1]} rows. "
                "Use 'traversal' for trees."
            )
        if N == 1:
            return jnp.ones((B, 1), p_BNV.dtype), p_BNV
        on_BN = tree.valid_BN
        q_BQV = draws.q_BQV[:, : N - 1]  # a smaller bucket of the same chain has fewer drafts
        q_BNV = jnp.concatenate([q_BQV, jnp.zeros((B, 1, V), p_BNV.dtype)], axis=1)
        row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
        at_N = jnp.arange(N - 1, dtype=jnp.int32)[None, :]
        token_BN = tree.token_BN[:, 1:]
        ratio_BN = p_BNV[row_B1, at_N, token_BN] / q_BNV[row_B1, at_N, token_BN]
        w = [jnp.ones(B, p_BNV.dtype)]
        for i in range(N - 1):
            w.append(jnp.where(on_BN[:, i + 1], jnp.minimum(w[-1] * ratio_BN[:, i], 1), 0))
        w_BN = jnp.stack(w, axis=1)
        last_BN = on_BN & ~jnp.pad(on_BN[:, 1:], ((0, 0), (0, 1)))
        left_BNV = jnp.maximum(w_BN[:, :, None] * p_BNV - q_BNV, 0)
        s_BN = left_BNV.sum(-1)
        below_BN = s_BN + 1 - w_BN
        h_BN = jnp.where(below_BN > 0, s_BN / jnp.where(below_BN > 0, below_BN, 1), 1)
        h_BN = jnp.where(last_BN, w_BN, h_BN)
        bonus_BNV = jnp.where(last_BN[:, :, None], p_BNV, normalise(left_BNV, p_BNV))
        return jnp.where(on_BN, h_BN, 0), bonus_BNV
