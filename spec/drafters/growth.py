"""Grows a tree of static shape, level by level, from whatever gives logits after its nodes."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import LayerKV
from spec.drafters.children import Chosen, choose
from spec.drafters.protocol import View
from spec.draws import Children, Draws, Kind
from spec.sampling import probabilities
from spec.tree import TokenTree
from spec.tree_shapes import TreeShape


@dataclasses.dataclass(frozen=True)
class Outline:
    """What is known of a tree before anything is drafted. Hashable, hence static.

    Attributes:
        shape: topology; a child's rank is its place in trial order.
        vocab_size: ids that the tokenizer knows: the vocabulary of p and q.
        how: TOP_K (deterministic), IID, WITHOUT_REPLACEMENT or GREEDY_PLUS_ONE.
        max_positions: tokens that the drafter can read.
    """

    shape: TreeShape
    vocab_size: int
    how: Children
    max_positions: int

    def __post_init__(self) -> None:
        """Refuses shapes that the children cannot fill, or would fill with a bias."""
        width = 1 + max(self.shape.rank)
        if width > self.vocab_size:
            raise ValueError(
                f"A node with {width} children needs as many tokens, the vocabulary has "
                f"{self.vocab_size}: use a narrower tree."
            )
        groups: dict[int, list[int]] = {}
        for parent, rank in zip(self.shape.parent[1:], self.shape.rank[1:], strict=True):
            groups.setdefault(parent, []).append(rank)
        gaps = [ranks for ranks in groups.values() if ranks != list(range(len(ranks)))]
        if gaps and self.how is Children.WITHOUT_REPLACEMENT:
            raise ValueError(
                f"Siblings of ranks {gaps[0]}: children drawn without replacement are tried in "
                "draw order, so their ranks must be 0, 1, 2, ... in slot order."
            )
        for level in self.shape.levels():
            widths = sorted({len(groups[node]) for node in level if node in groups})
            if len(widths) > 1 and self.how is Children.GREEDY_PLUS_ONE:
                raise ValueError(
                    f"Nodes of one level with {widths} children: greedy plus one draws outside of "
                    "the others, and a level is drawn at once, so all must have the same number."
                )


class StaticTree:
    """What drafters of a static shape have in common; a mixin for implementations of `Drafter`."""

    shape: TreeShape
    how: Children

    @property
    def depth(self) -> int:
        """Depth of the shape."""
        return self.shape.depth[-1]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Root alone (for rows past the drafter's context), or the whole shape."""
        return (1, self.shape.size) if self.shape.size > 1 else (1,)

    @property
    def children(self) -> frozenset[Children]:
        """`how`."""
        return frozenset({self.how})


class Reader(Protocol):
    """One pass of the drafter over nodes of one level."""

    def __call__(
        self,
        nodes: list[int],
        token_Bn: jax.Array,
        position_Bn: jax.Array,
        mask_Bnm: jax.Array,
        earlier: tuple[LayerKV, ...] | None,
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Returns the logits after `nodes` [B, n, U] and their K/V.

        Args:
            nodes: slots of the shape.
            token_Bn: int32, their tokens.
            position_Bn: int32, absolute.
            mask_Bnm: bool, which nodes of earlier passes, and of this one, each sees.
            earlier: K/V of the nodes read before in this proposal.
        """
        ...


def grow(
    outline: Outline,
    view: View,
    key_B: jax.Array,
    root_logits_B1U: jax.Array,
    root_kv: tuple[LayerKV, ...] | None,
    read: Reader,
    ids_U: jax.Array | None = None,
) -> tuple[TokenTree, Draws]:
    """Returns a tree of `outline.shape.size` slots and how its nodes were drawn.

    Args:
        outline: see `Outline`.
        view: see `View`.
        key_B: one random key a row.
        root_logits_B1U: the drafter's logits after the root.
        root_kv: the root's K/V if the drafter has not cached it.
        read: gives the logits after further nodes.
        ids_U: token id of each row of the drafter's head; None if they are the same.
    """
    shape = outline.shape
    growth = _Growth(outline, view, key_B, ids_U)
    growth.add([0], root_logits_B1U)
    mask = shape.ancestors()
    seen: list[int] = [] if root_kv is None else [0]
    earlier = root_kv
    for level in shape.levels()[1:-1]:
        inner = [node for node in level if node in shape.parent[1:]]
        token_Bn = jnp.stack([growth.token[node] for node in inner], axis=1)
        position_B1 = (view.length_B + shape.depth[inner[0]])[:, None]
        visible = jnp.asarray(mask[np.ix_(inner, seen + inner)])
        logits_BnU, kv = read(
            inner,
            token_Bn,
            jnp.broadcast_to(position_B1, token_Bn.shape),
            jnp.broadcast_to(visible, (token_Bn.shape[0], *visible.shape)),
            earlier,
        )
        growth.add(inner, logits_BnU)
        earlier = _extend(earlier, kv)
        seen += inner
    return growth.finish()


class _Growth:
    """A tree in the making: tokens, kinds and rows of q by node of the shape."""

    def __init__(self, outline: Outline, view: View, key_B: jax.Array, ids_U: jax.Array | None):
        self.outline, self.view, self.key_B, self.ids_U = outline, view, key_B, ids_U
        self.token = {0: view.root_B}
        self.valid = {0: jnp.ones_like(view.active_B)}
        self.kind: dict[int, Kind] = {}
        self.row: dict[int, int] = {}
        self.q_BnV: list[jax.Array] = []

    def add(self, nodes: list[int], logits_BnU: jax.Array) -> None:
        """Chooses the children of `nodes` from the drafter's logits after them."""
        shape = self.outline.shape
        kids = {n: [c for c in range(1, shape.size) if shape.parent[c] == n] for n in nodes}
        width = max((shape.rank[c] + 1 for group in kids.values() for c in group), default=0)
        if not width:
            return
        chosen = self._choose(nodes, logits_BnU, width)
        for i, node in enumerate(nodes):
            for child in kids[node]:
                rank = shape.rank[child]
                self.token[child] = chosen.token_Bnk[:, i, rank]
                self.valid[child] = self.valid[node] & chosen.some_Bnk[:, i, rank]
                self.kind[child] = chosen.kind_k[rank]
                self.row[child] = sum(rows.shape[1] for rows in self.q_BnV) + i
        if self.outline.how is not Children.TOP_K:
            self.q_BnV.append(chosen.q_BnV)

    def _choose(self, nodes: list[int], logits_BnU: jax.Array, width: int) -> Chosen:
        how, vocab = self.outline.how, self.outline.vocab_size
        key_B = jax.vmap(jax.random.fold_in, (0, None))(self.key_B, nodes[0])
        if how is Children.TOP_K:
            if self.ids_U is None:
                return choose(how, logits_BnU[..., :vocab], width, key_B)
            chosen = choose(how, logits_BnU, width, key_B)
            return chosen._replace(token_Bnk=self.ids_U[chosen.token_Bnk])
        if self.ids_U is None:
            q_BnV = probabilities(logits_BnU[..., :vocab], self.view.sampling)
            # A smaller table: the drafter gives the other ids no probability.
            q_BnV = jnp.pad(q_BnV, ((0, 0), (0, 0), (0, vocab - q_BnV.shape[2])))
        else:
            q_BnU = probabilities(logits_BnU, self.view.sampling)
            q_BnV = jnp.zeros((*q_BnU.shape[:2], vocab), q_BnU.dtype).at[..., self.ids_U].set(q_BnU)
        return choose(how, q_BnV, width, key_B)

    def finish(self) -> tuple[TokenTree, Draws]:
        """Returns the tree and its draws."""
        shape, B = self.outline.shape, self.view.root_B.shape[0]
        N = shape.size

        def tile(values: list[int] | tuple[int, ...]) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (B, len(values)))

        depth_BN = tile(shape.depth)
        # A draft of depth d was read off a pass at position length + d - 1.
        read_at_BN = self.view.length_B[:, None] + depth_BN - 1
        within_BN = (depth_BN == 0) | (read_at_BN < self.outline.max_positions)
        valid_BN = jnp.stack([self.valid[node] for node in range(N)], axis=1) & within_BN
        token_BN = jnp.stack([self.token[node] for node in range(N)], axis=1)
        drafts = range(1, N)
        kind_BM = tile([self.kind[node].value for node in drafts])
        draws = Draws(
            tile([*drafts]),
            tile(shape.parent[1:]),
            jnp.where(valid_BN[:, 1:], kind_BM, Kind.PADDING.value),
            tile([self.row[node] for node in drafts]),
            jnp.concatenate(self.q_BnV, axis=1) if self.q_BnV else jnp.zeros((B, 0, 0)),
        )
        return TokenTree(token_BN, tile(shape.parent), depth_BN, valid_BN), draws


def _extend(earlier: tuple[LayerKV, ...] | None, new: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
    if earlier is None:
        return new
    return jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), earlier, new)
