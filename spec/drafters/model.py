"""A smaller model of the same vocabulary drafts a tree of static shape, level by level."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import LayerKV
from models.kv_cache import KVCache, commit
from models.prefill import prefill
from models.transformer import Transformer, causal_mask
from spec.drafters.protocol import Step, View
from spec.draws import Draws, point_mass
from spec.tree import TokenTree, emitted_tokens
from spec.tree_shapes import TreeShape


class ModelState(NamedTuple):
    """The drafter's cache and the tokens it has not read yet, the next root last."""

    cache: KVCache
    unread_BP: jax.Array
    count_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts the most probable tokens of `model`. Implements `Drafter`.

    The first pass of a proposal reads the tokens emitted by the last step (at most depth + 1) as
    a chain and commits them; each further pass reads one level of the tree. So K/V made for
    drafts is never kept: what was accepted is read again in a pass that happens anyway, whoever
    drafted it, and rejected drafts leave no trace.

    Beyond the model's own `max_positions` a row gets no drafts; its neighbours are not touched.

    Attributes:
        model: any decoder whose token ids mean what the target's mean.
        shape: static topology.
        vocab_size: ids the drafter may propose: those that the tokenizer knows.
    """

    model: Transformer
    shape: TreeShape = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})

    @property
    def depth(self) -> int:
        """Depth of the shape."""
        return self.shape.depth[-1]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Root alone (for rows past the model's context), or the whole shape."""
        return (1, self.shape.size) if self.shape.size > 1 else (1,)

    def init(
        self, token_BT: jax.Array, length_B: jax.Array, hidden_BTD: jax.Array, capacity: int
    ) -> ModelState:
        """Prefills the drafter's own cache with prompt[:-1]."""
        capacity = min(capacity, self.model.config.max_positions)
        cache, _ = prefill(self.model, token_BT, length_B, capacity)
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
        unread_BP = jnp.pad(
            jnp.take_along_axis(token_BT, last_B1, axis=1), ((0, 0), (0, self.depth))
        )
        return ModelState(cache, unread_BP, jnp.minimum(length_B, 1))

    def propose(
        self, state: ModelState, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, ModelState]:
        """Reads what is new, then grows the tree."""
        B, P = state.unread_BP.shape
        position_BP = state.cache.length_B[:, None] + jnp.arange(P, dtype=jnp.int32)[None, :]
        out = self.model(state.unread_BP, position_BP, causal_mask(B, P), state.cache)
        cache = commit(state.cache, out.tree_kv, state.count_B)
        last_B11 = jnp.maximum(state.count_B - 1, 0)[:, None, None]
        hidden_B1D = jnp.take_along_axis(out.hidden_BND, last_B11, axis=1)

        levels = self.shape.levels()
        token_of = {0: view.root_B}
        candidates = self._top(self.model.head(hidden_B1D), levels[0])
        self._fill(token_of, levels[0], candidates)
        mask = self.shape.ancestors()
        read: list[int] = []
        earlier: tuple[LayerKV, ...] | None = None
        for level in levels[1:-1]:
            inner = [node for node in level if node in self.shape.parent[1:]]
            token_BN = jnp.stack([token_of[node] for node in inner], axis=1)
            depth = self.shape.depth[inner[0]]
            position_BN = jnp.broadcast_to((view.length_B + depth)[:, None], token_BN.shape)
            # The root is cached by now, so the tree part holds drafts only.
            seen = jnp.asarray(mask[np.ix_(inner, read + inner)])
            out = self.model(
                token_BN, position_BN, jnp.broadcast_to(seen, (B, *seen.shape)), cache, earlier
            )
            self._fill(token_of, inner, self._top(out.logits_BNV, inner))
            earlier = _extend(earlier, out.tree_kv)
            read += inner
        tree = self._tree(token_of, view)
        read_all = ModelState(cache, state.unread_BP, jnp.zeros_like(state.count_B))
        return tree, point_mass(tree), read_all

    def observe(self, state: ModelState, step: Step) -> ModelState:
        """Queues the accepted drafts and the bonus for the next first pass."""
        unread_BP = emitted_tokens(step.token_BP, step.count_B, step.bonus_B)
        return ModelState(state.cache, unread_BP, step.count_B)

    def _children(self, node: int) -> list[int]:
        return [i for i in range(1, self.shape.size) if self.shape.parent[i] == node]

    def _top(self, logits_BNV: jax.Array, nodes: list[int]) -> jax.Array:
        """Returns the most probable tokens after each node, [B, N, width]."""
        ranks = [self.shape.rank[child] for node in nodes for child in self._children(node)]
        width = max(ranks, default=0) + 1
        return jax.lax.top_k(logits_BNV[..., : self.vocab_size], width)[1].astype(jnp.int32)

    def _fill(self, token_of: dict[int, jax.Array], nodes: list[int], top: jax.Array) -> None:
        for i, node in enumerate(nodes):
            for child in self._children(node):
                token_of[child] = top[:, i, self.shape.rank[child]]

    def _tree(self, token_of: dict[int, jax.Array], view: View) -> TokenTree:
        N = self.shape.size
        token_BN = jnp.stack([token_of[node] for node in range(N)], axis=1)
        depth_BN = jnp.broadcast_to(jnp.asarray(self.shape.depth, jnp.int32), token_BN.shape)
        parent_BN = jnp.broadcast_to(jnp.asarray(self.shape.parent, jnp.int32), token_BN.shape)
        # A draft of depth d was read off a pass at position length + d - 1.
        read_at_BN = view.length_B[:, None] + depth_BN - 1
        valid_BN = (depth_BN == 0) | (read_at_BN < self.model.config.max_positions)
        return TokenTree(token_BN, parent_BN, depth_BN, valid_BN)


def _extend(earlier: tuple[LayerKV, ...] | None, new: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
    if earlier is None:
        return new
    return jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), earlier, new)
