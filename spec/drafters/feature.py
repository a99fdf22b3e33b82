"""Drafts from the target's own hidden states: a feature model behind what was accepted."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention import LayerKV
from models.feature import FeatureModel
from models.kv_cache import KVCache, commit
from models.prefill import prefill
from models.transformer import Output, causal_mask
from spec.drafters.growth import Outline, StaticTree, grow
from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws
from spec.tree import TokenTree, append, dropped, emitted_tokens
from spec.tree_shapes import TreeShape


class FeatureState(NamedTuple):
    """The drafter's cache, and what it has not read: tokens, each with the feature before it."""

    cache: KVCache
    unread_BU: jax.Array
    feature_BUD: jax.Array
    count_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureDrafter(StaticTree):
    """Grows a tree with a `FeatureModel`. Implements `Drafter`.

    As `ModelDrafter`, but beside every token it reads the feature before it: the target's wherever
    the target has been (`observe` brings it), its own inside the tree.

    Attributes:
        model: trained on this target's features.
        shape: static topology; a child's rank is its place in trial order.
        vocab_size: ids that the tokenizer knows: the vocabulary of p and q.
        ids_U: int32, token id of every row of the model's head.
        how: TOP_K (deterministic), IID, WITHOUT_REPLACEMENT or GREEDY_PLUS_ONE.
        lag: tokens that may wait unread between two proposals, beside those of one step, see
            `is_full`; 0 where every step has a proposal.
    """

    model: FeatureModel
    shape: TreeShape = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    ids_U: jax.Array
    how: Children = dataclasses.field(default=Children.TOP_K, metadata={"static": True})
    lag: int = dataclasses.field(default=0, metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses shapes that the children cannot fill."""
        if isinstance(self.model, FeatureModel):
            _ = self.outline

    @property
    def outline(self) -> Outline:
        """What is known of every tree."""
        return Outline(self.shape, self.vocab_size, self.how, self.model.config.max_positions)

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> FeatureState:
        """Prefills the drafter's own cache with prompt[:-1] and the target's features.

        Raises:
            ValueError: if the target does not hand out the states that the model reads.
        """
        feature_BTD = self.model.feature(hidden_BTID)
        B, _, D = feature_BTD.shape
        capacity = min(capacity, self.model.config.max_positions)
        before_BTD = jnp.pad(feature_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
        cache, _ = prefill(self.model, token_BT, length_B, capacity, before_BTD)
        root_B1 = jnp.take_along_axis(token_BT, jnp.maximum(length_B - 1, 0)[:, None], axis=1)
        last_B11 = jnp.maximum(length_B - 2, 0)[:, None, None]
        feature_B1D = jnp.take_along_axis(feature_BTD, last_B11, axis=1)
        # A text of one token has nothing before it.
        some_B11 = (length_B > 1)[:, None, None]
        feature_B1D = jnp.where(some_B11, feature_B1D, jnp.zeros((B, 1, D), feature_B1D.dtype))
        pad = path_size + self.lag - 1
        return FeatureState(
            cache,
            jnp.pad(root_B1, ((0, 0), (0, pad))),
            jnp.pad(feature_B1D, ((0, 0), (0, pad), (0, 0))),
            jnp.minimum(length_B, 1),
        )

    def propose(
        self, state: FeatureState, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, FeatureState]:
        """Reads what is new, then grows the tree on its own features."""
        state = self._caught_up(state)
        out = self._read(state)
        cache = commit(state.cache, out.tree_kv, state.count_B)
        last_B11 = jnp.maximum(state.count_B - 1, 0)[:, None, None]
        root_B1D = jnp.take_along_axis(out.final_BND, last_B11, axis=1)
        feature_BD = {0: root_B1D[:, 0]}

        def read(
            nodes: list[int],
            token_Bn: jax.Array,
            position_Bn: jax.Array,
            mask_Bnm: jax.Array,
            earlier: tuple[LayerKV, ...] | None,
        ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
            parents = [feature_BD[self.shape.parent[node]] for node in nodes]
            before_BnD = jnp.stack(parents, axis=1)
            out = self.model(token_Bn, before_BnD, position_Bn, mask_Bnm, cache, earlier)
            feature_BD.update({node: out.final_BND[:, i] for i, node in enumerate(nodes)})
            return out.logits_BNV, out.tree_kv

        logits_B1U = self.model.decoder.head(root_B1D)
        tree, draws = grow(self.outline, view, key_B, logits_B1U, None, read, self.ids_U)
        idle = state._replace(cache=cache, count_B=jnp.zeros_like(state.count_B))
        return tree, draws, idle

    def is_full(self, state: FeatureState) -> jax.Array:
        """Returns whether a proposal must come now, since a step's tokens may not fit: bool []."""
        return jnp.any(state.count_B > self.lag)

    def _read(self, state: FeatureState) -> Output:
        """Runs the model over the first tokens that wait, as many as a step can bring."""
        B, P = state.unread_BU.shape[0], state.unread_BU.shape[1] - self.lag
        position_BP = state.cache.length_B[:, None] + jnp.arange(P, dtype=jnp.int32)[None, :]
        return self.model(
            state.unread_BU[:, :P],
            state.feature_BUD[:, :P],
            position_BP,
            causal_mask(B, P),
            state.cache,
        )

    def _caught_up(self, state: FeatureState) -> FeatureState:
        """Reads until no more tokens wait than one pass takes; nothing at all without a lag."""
        U = state.unread_BU.shape[1]
        P = U - self.lag

        def body(state: FeatureState) -> FeatureState:
            out = self._read(state)
            count_B = jnp.clip(state.count_B - P, 0, P)
            return FeatureState(
                commit(state.cache, out.tree_kv, count_B),
                dropped(state.unread_BU, count_B),
                dropped(state.feature_BUD, count_B),
                state.count_B - count_B,
            )

        if not self.lag:
            return state
        return jax.lax.while_loop(lambda state: jnp.any(state.count_B > P), body, state)

    def observe(self, state: FeatureState, step: Step) -> FeatureState:
        """Queues the accepted drafts and the bonus, each with the target's state before it."""
        new_BP = emitted_tokens(step.token_BP, step.count_B, step.bonus_B)
        # Emitted token i follows path node i, whose hidden states are what stands before it.
        feature_BPD = self.model.feature(step.hidden_BPID).astype(state.feature_BUD.dtype)
        return FeatureState(
            state.cache,
            append(state.unread_BU, new_BP, state.count_B, step.count_B),
            append(state.feature_BUD, feature_BPD, state.count_B, step.count_B),
            state.count_B + step.count_B,
        )
