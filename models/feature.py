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

    Li et al. 2024 (arXiv 2401.15077), section 4.1. The feature is made of the target's hidden
    states at the token before: its final-norm output, or with `reads` a mixture of that and of
    states from deeper inside (EAGLE-3, arXiv 2503.01840, section 3.1), which still know of the
    text what the last one has given up for the next token. Where the target has not been yet, the
    model's own final-norm output stands in for the feature, so both live in one space of width D.

    Attributes:
        decoder: blocks, norm and head; its table is the target's own.
        token_DD: mixes the token's embedding in; first D are input features.
        feature_DD: mixes the feature in.
        mix_IDD: makes the feature of I hidden states; None for the last one as it is.
        reads: blocks of the target that I - 1 of the states are from: its `taps`.
    """

    def __init__(
        self,
        decoder: Transformer,
        token_DD: jax.Array,
        feature_DD: jax.Array,
        mix_IDD: jax.Array | None = None,
        reads: tuple[int, ...] = (),
    ):
        self.decoder = decoder
        self.token_DD = nnx.Param(token_DD)
        self.feature_DD = nnx.Param(feature_DD)
        self.mix_IDD = nnx.data(None if mix_IDD is None else nnx.Param(mix_IDD))
        self.reads = reads

    @property
    def config(self) -> ModelConfig:
        """Of the decoder."""
        return self.decoder.config

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return self.decoder.dtype

    @property
    def taps(self) -> tuple[int, ...]:
        """Of the decoder."""
        return self.decoder.taps

    def feature(self, hidden_BNID: jax.Array) -> jax.Array:
        """Makes [B, N, D] of the target's states, see `transformer.Output`.

        Raises:
            ValueError: if they are not those that this model reads.
        """
        if hidden_BNID.shape[-2] != len(self.reads) + 1:
            raise ValueError(
                f"This drafter reads the target's blocks {self.reads} and its final norm, there "
                f"are {hidden_BNID.shape[-2]} states a token: set the target's taps to "
                f"{self.reads}."
            )
        if self.mix_IDD is None:
            return hidden_BNID[..., -1, :]
        return contract(hidden_BNID.astype(self.dtype), self.mix_IDD[...], 2)

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
            feature_BND: of each token's parent: `feature` of the target's states, or this model's
                own final-norm output; zeros for the first token of a text.
            position_BN: int32, absolute.
            mask_BNM: bool.
            cache: committed prefix.
            earlier: K/V of tokens of earlier passes, or None.
            comm: communication.
        """
        x_BND = self.fuse(self.decoder.embed(token_BN, comm), feature_BND, comm)
        return self.decoder.run(x_BND, position_BN, mask_BNM, cache, earlier, comm)


def feature_model(
    decoder: Transformer, rngs: nnx.Rngs, reads: tuple[int, ...] = ()
) -> FeatureModel:
    """Returns a model to start training from: the mean of token and feature goes in.

    The feature is at first the target's final-norm output, whatever else is read.

    Args:
        decoder: a few layers of the target with a reduced head, see `models.prune`.
        rngs: for the small noise that tells the two apart.
        reads: see `FeatureModel`.
    """
    D, dtype = decoder.config.d_model, decoder.dtype
    mix_IDD = None
    if reads:
        others_IDD = jnp.zeros((len(reads), D, D), dtype)
        mix_IDD = jnp.concatenate((others_IDD, jnp.eye(D, dtype=dtype)[None]))
    half = jnp.asarray(0.5, dtype) * jnp.eye(D, dtype=dtype)
    noise = [
        jnp.asarray(0.02 / D**0.5, dtype) * jax.random.normal(rngs.params(), (D, D), dtype)
        for _ in range(2)
    ]
    return FeatureModel(decoder, half + noise[0], half + noise[1], mix_IDD, reads)
