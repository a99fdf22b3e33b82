"""A smaller model of the same tokenizer drafts a tree of static shape."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention import LayerKV
from models.kv_cache import KVCache, commit
from models.prefill import prefill
from models.transformer import Output, Transformer, causal_mask
from spec.drafters.growth import Outline, StaticTree, grow
from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws
from spec.tree import TokenTree, append, dropped, emitted_tokens
from spec.tree_shapes import TreeShape


class ModelState(NamedTuple):
    """The drafter's cache and the tokens it has not read yet, the next root last."""

    cache: KVCache
    unread_BU: jax.Array
    count_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter(StaticTree):
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
        ids_U: int32, token id of every row of the model's head, below `vocab_size`; None for a
            head that has a row for every id, in order.
        lag: tokens that may wait unread between two proposals, beside those of one step, see
            `is_full`; 0 where every step has a proposal.
    """

    model: Transformer
    shape: TreeShape = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    how: Children = dataclasses.field(default=Children.TOP_K, metadata={"static": True})
    ids_U: jax.Array | None = None
    lag: int = dataclasses.field(default=0, metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses shapes that the children cannot fill, and a reduced head without its ids."""
        if not isinstance(self.model, Transformer):
            return  # a pytree of something else, in the hands of JAX
        config, _ = self.model.config, self.outline
        if self.ids_U is None and config.draft_vocab_size < config.vocab_size:
            raise ValueError(
                f"The drafter's head has {config.draft_vocab_size} rows, its table "
                f"{config.vocab_size}: ids_U must say which token each row stands for."
            )

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
    ) -> ModelState:
        """Prefills the drafter's own cache with prompt[:-1]."""
        capacity = min(capacity, self.model.config.max_positions)
        cache, _ = prefill(self.model, token_BT, length_B, capacity)
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
        root_B1 = jnp.take_along_axis(token_BT, last_B1, axis=1)
        unread_BU = jnp.pad(root_B1, ((0, 0), (0, path_size + self.lag - 1)))
        return ModelState(cache, unread_BU, jnp.minimum(length_B, 1))

    def propose(
        self, state: ModelState, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, ModelState]:
        """Reads what is new, then grows the tree."""
        state = self._caught_up(state)
        out = self._read(state)
        cache = commit(state.cache, out.tree_kv, state.count_B)
        last_B11 = jnp.maximum(state.count_B - 1, 0)[:, None, None]
        logits_B1U = self.model.head(jnp.take_along_axis(out.final_BND, last_B11, axis=1))

        def read(
            nodes: list[int],
            token_Bn: jax.Array,
            position_Bn: jax.Array,
            mask_Bnm: jax.Array,
            earlier: tuple[LayerKV, ...] | None,
        ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
            out = self.model(token_Bn, position_Bn, mask_Bnm, cache, earlier)
            return out.logits_BNV, out.tree_kv

        # The root is cached by now, so the tree part holds drafts only.
        tree, draws = grow(self.outline, view, key_B, logits_B1U, None, read, self.ids_U)
        return tree, draws, ModelState(cache, state.unread_BU, jnp.zeros_like(state.count_B))

    def is_full(self, state: ModelState) -> jax.Array:
        """Returns whether a proposal must come now, since a step's tokens may not fit: bool []."""
        return jnp.any(state.count_B > self.lag)

    def _read(self, state: ModelState) -> Output:
        """Runs the model over the first tokens that wait, as many as a step can bring."""
        B, P = state.unread_BU.shape[0], state.unread_BU.shape[1] - self.lag
        position_BP = state.cache.length_B[:, None] + jnp.arange(P, dtype=jnp.int32)[None, :]
        return self.model(state.unread_BU[:, :P], position_BP, causal_mask(B, P), state.cache)

    def _caught_up(self, state: ModelState) -> ModelState:
        """Reads until no more tokens wait than one pass takes; nothing at all without a lag."""
        P = state.unread_BU.shape[1] - self.lag

        def body(state: ModelState) -> ModelState:
            out = self._read(state)
            count_B = jnp.clip(state.count_B - P, 0, P)
            return ModelState(
                commit(state.cache, out.tree_kv, count_B),
                dropped(state.unread_BU, count_B),
                state.count_B - count_B,
            )

        if not self.lag:
            return state
        return jax.lax.while_loop(lambda state: jnp.any(state.count_B > P), body, state)

    def observe(self, state: ModelState, step: Step) -> ModelState:
        """Queues the accepted drafts and the bonus for the next first pass."""
        new_BP = emitted_tokens(step.token_BP, step.count_B, step.bonus_B)
        return ModelState(
            state.cache,
            append(state.unread_BU, new_BP, state.count_B, step.count_B),
            state.count_B + step.count_B,
        )
