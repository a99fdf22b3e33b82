"""A LLaMA decoder as `Stages`, and the way between training's stacked blocks and decoding's."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Context, LayerKV
from models.config import ModelConfig
from models.feature import FeatureModel
from models.layers import rope_tables
from models.losses import Batch, FeatureBatch, Teacher, cross_entropy, divergence
from models.seats import seats_of
from models.transformer import Block, Transformer
from parallel.comm import LOCAL, Comm
from parallel.stages import Params, Stages, forward, num_blocks, one_block, stack

Loss = Literal["cross_entropy", "forward_kl", "reverse_kl"]
# What a drafter has from its target and may leave as it is.
TABLE, HEAD = "embed_VD", "head_DU"


def llama_stages(
    config: ModelConfig,
    loss: Loss = "cross_entropy",
    temperature: float = 1.0,
    frozen: Collection[str] = (),
) -> Stages:
    """Returns the stages of a `Transformer` or a `FeatureModel`; parameters from `split`.

    Batches are `Batch`, for a `FeatureModel` with the target's states, or `FeatureBatch`.

    Args:
        config: the model's shape.
        loss: see `models.losses`; the two divergences need `Batch.teacher`.
        temperature: of the divergences.
        frozen: which of `TABLE` and `HEAD` get no gradient: those that are the target's own.
            (The optimiser must leave them alone too: weight decay needs no gradient.)

    Raises:
        ValueError: for an unknown loss or frozen name, or a table that is the head as well.
    """
    if loss not in ("cross_entropy", "forward_kl", "reverse_kl"):
        raise ValueError(f"Loss {loss!r}: use cross_entropy, forward_kl or reverse_kl.")
    if not {*frozen} <= {TABLE, HEAD}:
        raise ValueError(f"Frozen {sorted(frozen)}: only {TABLE} and {HEAD} can be.")
    if frozen and config.tied_embeddings:
        raise ValueError("A tied table is the head as well and cannot be frozen: untie it.")

    def held(outer: Transformer | FeatureModel) -> Transformer:
        """Returns the decoder, its frozen arrays without a way back for gradients."""
        decoder = nnx.clone(decoder_of(outer))
        for name in frozen:
            setattr(decoder, name, nnx.Param(jax.lax.stop_gradient(getattr(decoder, name)[...])))
        return decoder

    def embed(outer: Transformer | FeatureModel, batch: Batch, comm: Comm) -> jax.Array:
        x_BTD = held(outer).embed(batch.token_BT, comm)
        if isinstance(outer, Transformer):
            return x_BTD
        if batch.hidden_BTID is None:
            raise ValueError("A feature model reads the target's states: hidden_BTID is missing.")
        T = batch.hidden_BTID.shape[1]
        feature_BTD = outer.feature(batch.hidden_BTID.astype(outer.dtype))
        before_BTD = _before(feature_BTD, batch.position_BT[:, :T])
        if isinstance(batch, FeatureBatch):
            own_BTD = batch.own_feature_BTD.astype(outer.dtype)
            before_BTD = jnp.concatenate((before_BTD, own_BTD), axis=1)
        return outer.fuse(x_BTD, before_BTD, comm)

    def context(batch: Batch) -> Context:
        # Float32 tables; `block` casts them to whatever the weights are computed in.
        tables = rope_tables(config, batch.position_BT, jnp.float32)
        none_B = jnp.zeros(batch.token_BT.shape[0], jnp.int32)
        return Context(*tables, batch.mask(), none_B, "reference")

    def block(
        weights: Block, x_BTD: jax.Array, ctx: Context, comm: Comm
    ) -> tuple[jax.Array, LayerKV]:
        K, A = weights.attention.k_DKA.shape[1:]  # of this device's heads
        nothing = jnp.zeros((x_BTD.shape[0], K, 0, A), x_BTD.dtype)
        tables = (ctx.cos_BNa.astype(x_BTD.dtype), ctx.sin_BNa.astype(x_BTD.dtype))
        ctx = Context(*tables, ctx.mask_BNM, ctx.length_B, ctx.kernel)
        return weights(x_BTD, ctx, (nothing, nothing), None, comm)

    def head(outer: Transformer | FeatureModel, x_BTD: jax.Array, comm: Comm) -> jax.Array:
        decoder = held(outer)
        logits_BTU = decoder.head(decoder.final_norm(x_BTD), comm)
        return comm.without_padding(logits_BTU, config.draft_vocab_size)

    def loss_of(
        outer: Transformer | FeatureModel, x_BTD: jax.Array, batch: Batch, comm: Comm
    ) -> tuple[jax.Array, jax.Array]:
        logits_BTU = head(outer, x_BTD, comm)
        if loss == "cross_entropy":
            return cross_entropy(logits_BTU, batch.label_BT, batch.weight_BT, comm)
        if batch.teacher is None:
            raise ValueError(f"Loss {loss!r} needs the teacher's distribution: Batch.teacher.")
        kind: Literal["forward", "reverse"] = "forward" if loss == "forward_kl" else "reverse"
        return divergence(batch.teacher, logits_BTU, batch.weight_BT, kind, temperature, comm)

    return Stages(embed, context, block, head, loss_of, functools.partial(seats_of, config))


def decoder_of(model: Transformer | FeatureModel) -> Transformer:
    """Returns the part that has blocks, norm and head."""
    return model if isinstance(model, Transformer) else model.decoder


def split(model: Transformer | FeatureModel) -> Params:
    """Returns the weights of `model` as training keeps them; `join` is the way back."""
    outer = nnx.clone(model)
    blocks = [*decoder_of(outer).blocks]
    decoder_of(outer).blocks = nnx.List([])
    return Params(outer, stack(blocks))


def join(params: Params) -> Any:
    """Returns the model that decodes, of the class that was split: its blocks have own arrays."""
    model = nnx.clone(params.outer)
    blocks = [one_block(params.blocks, layer) for layer in range(num_blocks(params.blocks))]
    decoder_of(model).blocks = nnx.List(blocks)
    return model


def is_frozen(path: tuple[Any, ...], frozen: Collection[str]) -> bool:
    """Says whether a leaf of `Params`, by its key path, belongs to one of `frozen`."""
    return any(getattr(key, "name", getattr(key, "key", None)) in frozen for key in path)


def with_teacher(params: Params, batch: Batch) -> Batch:
    """Adds the target's distribution after each token, over the rows of the drafter's head.

    Only for a frozen head, whose rows are the target's: the teacher is what it makes of the
    target's own final-norm output.

    Raises:
        ValueError: if the batch has no `hidden_BTID`.
    """
    if batch.hidden_BTID is None:
        raise ValueError("A teacher is made of the target's states: the batch has no hidden_BTID.")
    decoder = decoder_of(params.outer)
    logits_BTU = decoder.head(batch.hidden_BTID[..., -1, :].astype(decoder.dtype), LOCAL)
    return dataclasses.replace(batch, teacher=Teacher(None, logits_BTU))


def with_own_features(stages: Stages, params: Params, batch: Batch) -> FeatureBatch:
    """Appends to each row its repetition with the drafter's own features; see `FeatureBatch`.

    The features are computed with the present weights and get no gradient. [B, T] -> [B, 2T].
    """
    hidden_BTD = decoder_of(params.outer).final_norm(forward(stages, params, batch, LOCAL))
    own_BTD = jax.lax.stop_gradient(_before(hidden_BTD, batch.position_BT))

    def twice(array: jax.Array) -> jax.Array:
        return jnp.concatenate((array, array), axis=1)

    # The first token of a text has nothing before it, and was drafted by nobody.
    weight_BT = jnp.where(batch.position_BT == 0, jnp.zeros_like(batch.weight_BT), batch.weight_BT)
    own_BT = jnp.zeros(batch.token_BT.shape, jnp.bool_)
    return FeatureBatch(
        teacher=jax.tree.map(twice, batch.teacher),
        token_BT=twice(batch.token_BT),
        position_BT=twice(batch.position_BT),
        segment_BT=twice(batch.segment_BT),
        label_BT=twice(batch.label_BT),
        weight_BT=jnp.concatenate((batch.weight_BT, weight_BT), axis=1),
        hidden_BTID=batch.hidden_BTID,
        own_feature_BTD=own_BTD,
        own_BT=jnp.concatenate((own_BT, ~own_BT), axis=1),
    )


def _before(feature_BTD: jax.Array, position_BT: jax.Array) -> jax.Array:
    """Returns of each token what stands before it; zeros before the first of a text."""
    before_BTD = jnp.pad(feature_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    first_BT1 = position_BT[:, :, None] == 0
    return jnp.where(first_BT1, jnp.zeros_like(before_BTD), before_BTD)
