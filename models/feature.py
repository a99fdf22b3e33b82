"""A decoder that reads the target's thoughts: each token beside the target's state before it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import LayerKV
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.transformer import Output, Transformer
from parallel.comm import LOCAL, Comm, contract


class FeatureModel(nnx.Module):
    """One or a few blocks over (token, feature of the token before): EAGLE's idea.

    Li et al. 2024 (arXiv 2401.15077), section 4.1. The feature is the target's final-norm output
    at the token before; where the target has not been yet, the model's own final-norm output
    stands in for it, so both live in one space of width D.

    Attributes:
        decoder: blocks, norm and head; its table is the target's own.
        token_DD: mixes the token's embedding in; first D are input features.
        feature_DD: mixes the feature in.
    """

    def __init__(self, decoder: Transformer, token_DD: jax.Array, feature_DD: jax.Array):
        self.decoder = decoder
        self.token_DD = nnx.Param(token_DD)
        self.feature_DD = nnx.Param(feature_DD)

    @property
    def config(self) -> ModelConfig:
        """Of the decoder."""
        return self.decoder.config

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return self.decoder.dtype

    def fuse(self, x_BND: jax.Array, feature_BND: jax.Array, comm: Comm) -> jax.Array:
        """Mixes embedded tokens with features, [B, N, D] each, to [B, N, D]."""
        mine_BND = comm.scatter_sequence(feature_BND.astype(x_BND.dtype))
        # Token by token: nothing to send.
        return contract(x_BND, self.token_DD[...], 1) + contract(mine_BND, self.feature_DD[...], 1)

    def __call__(
        self,
        token_BN: jax.Array,
        feature_BND: jax.Array,
        position_BN: jax.Array,
        mask_BNM: jax.Array,
        cache: KVCache,
        earlier: Sequence[LayerKV] | None = None,
        comm: Comm = LOCAL,
    ) -> Output:
        """Runs N tokens a row; see `Transformer.__call__`.

        Args:
            token_BN: int32.
            feature_BND: final-norm output, the target's or this model's, at each token's parent;
                zeros for the first token of a text.
            position_BN: int32, absolute.
            mask_BNM: bool.
            cache: committed prefix.
            earlier: K/V of tokens of earlier passes, or None.
            comm: communication.
        """
        x_BND = self.fuse(self.decoder.embed(token_BN, comm), feature_BND, comm)
        return self.decoder.run(x_BND, position_BN, mask_BNM, cache, earlier, comm)


def feature_model(decoder: Transformer, rngs: nnx.Rngs) -> FeatureModel:
    """Returns a model to start training from: the mean of token and feature goes in.

    Args:
        decoder: a few layers of the target with a reduced head, see `models.prune`.
        rngs: for the small noise that tells the two apart.
    """
    D, dtype = decoder.config.d_model, decoder.dtype
    half = jnp.asarray(0.5, dtype) * jnp.eye(D, dtype=dtype)
    noise = [
        jnp.asarray(0.02 / D**0.5, dtype) * jax.random.normal(rngs.params(), (D, D), dtype)
        for _ in range(2)
    ]
    return FeatureModel(decoder, half + noise[0], half + noise[1])
