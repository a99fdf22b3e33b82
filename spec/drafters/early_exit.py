"""The target's own first layers draft: nothing to load, nothing to cache (LayerSkip's idea)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import LayerKV
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.transformer import Transformer
from spec.drafters.growth import Outline, StaticTree, grow
from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws
from spec.tree import TokenTree
from spec.tree_shapes import TreeShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EarlyExitDrafter(StaticTree):
    """Runs the first `layers` blocks of the target, then its final norm and head.

    Elhoushi et al. 2024 (arXiv 2404.16710), section 4.3, without their training. The early layers
    share the target's cache: what the target committed is what they would have computed, so there
    is no state, nothing to roll back, and the drafter cannot fall behind. It reads the root again
    and the drafts level by level, and keeps none of it. Implements `Drafter`.

    Attributes:
        config: the target's.
        layers: how many of its layers run, at least 1; all of them draft what the target says.
        shape: static topology; a child's rank is its place in trial order.
        vocab_size: ids that the tokenizer knows: the vocabulary of p and q.
        how: TOP_K (deterministic), IID, WITHOUT_REPLACEMENT or GREEDY_PLUS_ONE.
    """

    config: ModelConfig = dataclasses.field(metadata={"static": True})
    layers: int = dataclasses.field(metadata={"static": True})
    shape: TreeShape = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    how: Children = dataclasses.field(default=Children.TOP_K, metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses an exit that the target does not have, and what `Outline` refuses."""
        if not 1 <= self.layers <= self.config.num_layers:
            raise ValueError(
                f"Exit after {self.layers} layers: the target has {self.config.num_layers}, "
                f"choose 1..{self.config.num_layers}."
            )
        _ = self.outline

    @property
    def outline(self) -> Outline:
        """What is known of every tree."""
        return Outline(self.shape, self.vocab_size, self.how, self.config.max_positions)

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> tuple[()]:
        """No state."""
        return ()

    def propose(
        self, state: tuple[()], view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, tuple[()]]:
        """Reads the root behind the target's cache, then grows the tree."""
        model = first_layers(view.target, self.layers)
        cache = KVCache(
            view.cache.k_BKSA[: self.layers],
            view.cache.v_BKSA[: self.layers],
            view.cache.length_B,
        )
        B = view.root_B.shape[0]
        root = model(
            view.root_B[:, None],
            view.length_B[:, None],
            jnp.ones((B, 1, 1), jnp.bool_),
            cache,
        )

        def read(
            nodes: list[int],
            token_Bn: jax.Array,
            position_Bn: jax.Array,
            mask_Bnm: jax.Array,
            earlier: tuple[LayerKV, ...] | None,
        ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
            out = model(token_Bn, position_Bn, mask_Bnm, cache, earlier)
            return out.logits_BNV, out.tree_kv

        tree, draws = grow(self.outline, view, key_B, root.logits_BNV, root.tree_kv, read)
        return tree, draws, state

    def observe(self, state: tuple[()], step: Step) -> tuple[()]:
        """No state: the target's cache has what was accepted."""
        return state


def first_layers(model: Transformer, layers: int) -> Transformer:
    """Returns a decoder of the first `layers` blocks, sharing all arrays."""
    out = nnx.clone(model)
    out.blocks = nnx.List([*out.blocks][:layers])
    out.config = dataclasses.replace(model.config, num_layers=layers)
    return out
