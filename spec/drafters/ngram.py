"""Prompt lookup that grows a tree: continuations of the longest matching suffixes, merged.

The chain version is Saxena 2023 (prompt lookup decoding); scoring merged continuations by how
often they were seen follows the idea of SuffixDecoding (arXiv 2411.04975), here without a suffix
tree: the match is a vectorised comparison on the device.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws, point_mass
from spec.merge import same_path
from spec.tree import TokenTree, append, compact, emitted_tokens

# Weights are 4^(match length) in float32, whose sums must stay finite.
_LONGEST_WINDOW = 32


class History(NamedTuple):
    """State: every token of the row so far, the root included."""

    token_BS: jax.Array
    length_B: jax.Array


class Found(NamedTuple):
    """What a lookup found.

    Attributes:
        chains: continuations of the matches, equal paths sharing their first node; slot 0 is the
            root. The first chain follows the best match.
        votes_BN: weight of each node, infinite for the root, -1 for padding and repetitions.
        run_B: int32, length of the best match, tokens; 0 without one.
    """

    chains: TokenTree
    votes_BN: jax.Array
    run_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGramDrafter:
    """Looks the current suffix up in the row's own history. Implements `Drafter`.

    Rule: at every earlier position the match length is the number of trailing tokens (at most
    `window`) that equal the current suffix; the suffix may not match itself. The `matches`
    longest, the most recent first among equals, give their following tokens (at most `depth`, as
    many as there are). Equal continuations are fused; a node's weight is the sum over the matches
    through it of 4^(match length), so one longer match outweighs three shorter ones. The
    `size - 1` heaviest drafts are kept, earlier matches first among equals; `unsure - 1` where no
    match is as long as the window.

    Attributes:
        window: longest suffix compared, tokens.
        min_match: shortest match that drafts, tokens.
        matches: continuations merged.
        depth: longest draft.
        sizes: ascending tree sizes to compile for, the last being N.
        unsure: most nodes, root included, behind matches shorter than the window; None for N. It
            leaves the others to drafters beside it, see `EnsembleDrafter.budget`.
    """

    window: int = dataclasses.field(default=4, metadata={"static": True})
    min_match: int = dataclasses.field(default=1, metadata={"static": True})
    matches: int = dataclasses.field(default=8, metadata={"static": True})
    depth: int = dataclasses.field(default=7, metadata={"static": True})
    sizes: tuple[int, ...] = dataclasses.field(default=(1, 8), metadata={"static": True})
    unsure: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses settings that cannot draft."""
        if min(self.window, self.min_match, self.matches, self.depth, *self.sizes) < 1:
            raise ValueError(f"{self}: window, matches, depth and sizes must be at least 1.")
        if not self.min_match <= self.window <= _LONGEST_WINDOW:
            raise ValueError(
                f"{self}: window must lie in {self.min_match} (min_match)..{_LONGEST_WINDOW}."
            )
        if sorted(set(self.sizes)) != list(self.sizes):
            raise ValueError(f"sizes {self.sizes} must be ascending.")
        if self.unsure is not None and not 1 <= self.unsure <= self.sizes[-1]:
            raise ValueError(
                f"unsure {self.unsure} must lie in 1..{self.sizes[-1]}, the largest size."
            )

    @property
    def buckets(self) -> tuple[int, ...]:
        """`sizes`."""
        return self.sizes

    @property
    def children(self) -> frozenset[Children]:
        """Deterministic: a lookup."""
        return frozenset({Children.TOP_K})

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> History:
        """Copies the prompt into a buffer of `capacity` tokens."""
        B, T = token_BT.shape
        buffer = jnp.zeros((B, max(capacity, T)), jnp.int32)
        return History(buffer.at[:, :T].set(token_BT), length_B)

    def propose(
        self, state: History, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, History]:
        """Returns the merged tree; rows without a match get the root alone."""
        found = self.look_up(state, view.root_B)
        size = self.buckets[-1]
        sure_B = found.run_B == self.window
        most_B = jnp.where(sure_B, size, size if self.unsure is None else self.unsure)
        tree = self.heaviest(found, most_B)
        return tree, point_mass(tree), state

    def look_up(self, state: History, root_B: jax.Array) -> Found:
        """Returns all that the history has to say after the current suffix."""
        run_BS = _match_length(state, self.window)
        S = run_BS.shape[1]
        index_S = jnp.arange(S, dtype=jnp.int32)
        # Longest first, then most recent: one sort key.
        order_BS = jnp.where(run_BS >= self.min_match, run_BS * S + index_S[None, :], -1)
        best_BW, end_BW = jax.lax.top_k(order_BS, min(self.matches, S))
        chains, weight_BN = _chains(state, root_B, best_BW // S, end_BW, self.depth)

        same = same_path(chains)
        first_BN = jnp.argmax(same, axis=2).astype(jnp.int32)
        votes_BN = jnp.einsum("BNM,BM->BN", same.astype(jnp.float32), weight_BN)
        index_N = jnp.arange(chains.size, dtype=jnp.int32)
        unique_BN = chains.valid_BN & (first_BN == index_N[None, :])
        parent_BN = jnp.take_along_axis(first_BN, chains.parent_BN, axis=1)
        chains = dataclasses.replace(chains, parent_BN=parent_BN)
        votes_BN = jnp.where(unique_BN, votes_BN, -1.0).at[:, 0].set(jnp.inf)
        return Found(chains, votes_BN, jnp.maximum(best_BW[:, 0] // S, 0))

    def heaviest(self, found: Found, most_B: jax.Array) -> TokenTree:
        """Returns the `most_B` heaviest nodes, root included, in a tree of `buckets[-1]` slots."""
        # A parent carries at least its child's votes and an earlier slot, and top_k prefers
        # earlier slots among equals: the kept set is ancestor-closed.
        _, top_BN = jax.lax.top_k(found.votes_BN, min(self.buckets[-1], found.chains.size))
        wanted_BN = jnp.arange(top_BN.shape[1], dtype=jnp.int32)[None, :] < most_B[:, None]
        row_B1 = jnp.arange(top_BN.shape[0], dtype=jnp.int32)[:, None]
        keep_BN = jnp.zeros(found.votes_BN.shape, jnp.bool_).at[row_B1, top_BN].set(wanted_BN)
        return compact(found.chains, keep_BN & (found.votes_BN > 0), self.buckets[-1])[0]

    def observe(self, state: History, step: Step) -> History:
        """Appends the accepted drafts and the bonus."""
        new_BP = emitted_tokens(step.token_BP, step.count_B, step.bonus_B)
        return History(
            append(state.token_BS, new_BP, state.length_B, step.count_B),
            state.length_B + step.count_B,
        )


def _match_length(state: History, window: int) -> jax.Array:
    """Returns int32 [B, S]: trailing tokens at each position that equal the current suffix."""
    token_BS, length_B = state
    B, S = token_BS.shape
    index_S = jnp.arange(S, dtype=jnp.int32)[None, :]
    padded = jnp.pad(token_BS, ((0, 0), (window, 0)))
    alive_BS = index_S < length_B[:, None] - 1  # the suffix may not match itself
    run_BS = jnp.zeros((B, S), jnp.int32)
    for back in range(window):
        at_B = length_B - 1 - back
        wanted_B1 = jnp.take_along_axis(token_BS, jnp.maximum(at_B, 0)[:, None], axis=1)
        earlier_BS = padded[:, window - back : window - back + S]
        alive_BS &= (earlier_BS == wanted_B1) & (index_S >= back) & (at_B >= 0)[:, None]
        run_BS += alive_BS.astype(jnp.int32)
    return run_BS


def _chains(
    state: History, root_B: jax.Array, run_BW: jax.Array, end_BW: jax.Array, depth: int
) -> tuple[TokenTree, jax.Array]:
    """Returns the unmerged tree of all continuations, and each node's weight."""
    B, W = end_BW.shape
    step_D = jnp.arange(depth, dtype=jnp.int32)
    source_BWD = end_BW[:, :, None] + 1 + step_D[None, None, :]
    valid_BWD = (run_BW > 0)[:, :, None] & (source_BWD < state.length_B[:, None, None])
    S = state.token_BS.shape[1]
    flat = jnp.minimum(source_BWD, S - 1).reshape(B, W * depth)
    token_BN = jnp.take_along_axis(state.token_BS, flat, axis=1)
    weight_BWD = jnp.where(valid_BWD, 4.0 ** run_BW[:, :, None].astype(jnp.float32), 0.0)

    def with_root(root: jax.Array, rest: jax.Array) -> jax.Array:
        return jnp.concatenate([root, rest.reshape(rest.shape[0], W * depth)], axis=1)

    slot_WD = 1 + jnp.arange(W * depth, dtype=jnp.int32).reshape(1, W, depth)
    parent_WD = jnp.where(step_D[None, None, :] == 0, 0, slot_WD - 1)
    zero_B1 = jnp.zeros((B, 1), jnp.int32)
    all_BWD = (B, W, depth)
    tree = TokenTree(
        with_root(root_B[:, None], token_BN),
        with_root(zero_B1, jnp.broadcast_to(parent_WD, all_BWD)),
        with_root(zero_B1, jnp.broadcast_to(step_D[None, None, :] + 1, all_BWD)),
        with_root(jnp.ones((B, 1), jnp.bool_), valid_BWD),
    )
    return tree, with_root(jnp.zeros((B, 1), jnp.float32), weight_BWD)
