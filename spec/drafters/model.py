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
from spec.drafters.children import Chosen, choose
from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws, Kind
from spec.sampling import probabilities
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
    """Drafts with `model` along `shape`. Implements `Drafter`.

    The first pass of a proposal reads the tokens emitted by the last step (at most depth + 1) as
    a chain and commits them; each further pass reads one level of the tree. So K/V made for
    drafts is never kept: what was accepted is read again in a pass that happens anyway, whoever
    drafted it, and rejected drafts leave no trace.

    Beyond the model's own `max_positions` a row gets no drafts; its neighbours are not touched.

    Attributes:
        model: any decoder whose token ids mean what the target's mean.
        shape: static topology; a child's rank is its place in trial order.
        vocab_size: ids that the tokenizer knows: the vocabulary of p and q.
        how: TOP_K (deterministic), IID, WITHOUT_REPLACEMENT or GREEDY_PLUS_ONE.
    """

    model: Transformer
    shape: TreeShape = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    how: Children = dataclasses.field(default=Children.TOP_K, metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses shapes that its children cannot fill, or would fill with a bias."""
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

    @property
    def depth(self) -> int:
        """Depth of the shape."""
        return self.shape.depth[-1]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Root alone (for rows past the model's context), or the whole shape."""
        return (1, self.shape.size) if self.shape.size > 1 else (1,)

    @property
    def children(self) -> frozenset[Children]:
        """`how`."""
        return frozenset({self.how})

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTD: jax.Array,
        capacity: int,
        path_size: int,
    ) -> ModelState:
        """Prefills the drafter's own cache with prompt[:-1]."""
        capacity = min(capacity, self.model.config.max_positions)
        cache, _ = prefill(self.model, token_BT, length_B, capacity)
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
        root_B1 = jnp.take_along_axis(token_BT, last_B1, axis=1)
        unread_BP = jnp.pad(root_B1, ((0, 0), (0, path_size - 1)))
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
        logits_BNV = self.model.head(jnp.take_along_axis(out.hidden_BND, last_B11, axis=1))

        growth = _Growth(self, view, key_B)
        growth.add([0], logits_BNV)
        mask = self.shape.ancestors()
        read: list[int] = []
        earlier: tuple[LayerKV, ...] | None = None
        for level in self.shape.levels()[1:-1]:
            inner = [node for node in level if node in self.shape.parent[1:]]
            token_BN = jnp.stack([growth.token[node] for node in inner], axis=1)
            depth = self.shape.depth[inner[0]]
            position_BN = jnp.broadcast_to((view.length_B + depth)[:, None], token_BN.shape)
            # The root is cached by now, so the tree part holds drafts only.
            seen = jnp.asarray(mask[np.ix_(inner, read + inner)])
            out = self.model(
                token_BN, position_BN, jnp.broadcast_to(seen, (B, *seen.shape)), cache, earlier
            )
            growth.add(inner, out.logits_BNV)
            earlier = _extend(earlier, out.tree_kv)
            read += inner
        tree, draws = growth.finish()
        return tree, draws, ModelState(cache, state.unread_BP, jnp.zeros_like(state.count_B))

    def observe(self, state: ModelState, step: Step) -> ModelState:
        """Queues the accepted drafts and the bonus for the next first pass."""
        unread_BP = emitted_tokens(step.token_BP, step.count_B, step.bonus_B)
        return ModelState(state.cache, unread_BP, step.count_B)


class _Growth:
    """A tree in the making: tokens, kinds and rows of q by node of the shape."""

    def __init__(self, drafter: ModelDrafter, view: View, key_B: jax.Array):
        self.drafter, self.view, self.key_B = drafter, view, key_B
        self.token = {0: view.root_B}
        self.valid = {0: jnp.ones_like(view.active_B)}
        self.kind: dict[int, Kind] = {}
        self.row: dict[int, int] = {}
        self.q_BnV: list[jax.Array] = []

    def add(self, nodes: list[int], logits_BnV: jax.Array) -> None:
        """Chooses the children of `nodes` from the drafter's logits after them."""
        shape, vocab = self.drafter.shape, self.drafter.vocab_size
        kids = {n: [c for c in range(1, shape.size) if shape.parent[c] == n] for n in nodes}
        width = max((shape.rank[c] + 1 for group in kids.values() for c in group), default=0)
        if not width:
            return
        q_BnV = probabilities(logits_BnV[..., :vocab], self.view.sampling)
        # A smaller table: the drafter gives the other ids no probability.
        q_BnV = jnp.pad(q_BnV, ((0, 0), (0, 0), (0, vocab - q_BnV.shape[2])))
        best = self.drafter.how is Children.TOP_K
        chosen: Chosen = choose(
            self.drafter.how,
            logits_BnV[..., :vocab] if best else q_BnV,
            width,
            jax.vmap(jax.random.fold_in, (0, None))(self.key_B, nodes[0]),
        )
        for i, node in enumerate(nodes):
            for child in kids[node]:
                rank = shape.rank[child]
                self.token[child] = chosen.token_Bnk[:, i, rank]
                self.valid[child] = self.valid[node] & chosen.some_Bnk[:, i, rank]
                self.kind[child] = chosen.kind_k[rank]
                self.row[child] = sum(rows.shape[1] for rows in self.q_BnV) + i
        if not best:
            self.q_BnV.append(chosen.q_BnV)

    def finish(self) -> tuple[TokenTree, Draws]:
        """Returns the tree and its draws."""
        shape, B = self.drafter.shape, self.view.root_B.shape[0]
        N = shape.size

        def tile(values: list[int] | tuple[int, ...]) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (B, len(values)))

        depth_BN = tile(shape.depth)
        # A draft of depth d was read off a pass at position length + d - 1.
        read_at_BN = self.view.length_B[:, None] + depth_BN - 1
        within_BN = (depth_BN == 0) | (read_at_BN < self.drafter.model.config.max_positions)
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
