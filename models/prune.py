"""A smaller decoder made of a larger one: some of its layers, some rows of its head."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.transformer import Transformer


def prune(model: Transformer, layers: Sequence[int], ids_U: np.ndarray) -> Transformer:
    """Returns a decoder to start training a drafter from.

    It shares the arrays of `model` (embedding table included); its head is a copy of the rows
    `ids_U` of the model's head.

    Args:
        model: the target.
        layers: which of its layers, in this order.
        ids_U: int32, token id of every row of the new head.

    Raises:
        ValueError: if the model has no such layer.
    """
    L = model.config.num_layers
    if not layers or not all(0 <= layer < L for layer in layers):
        raise ValueError(f"Layers {tuple(layers)}: the model has layers 0..{L - 1}.")
    blocks = [*model.blocks]
    head_VD = model.embed_VD[...] if model.head_DU is None else model.head_DU[...].T
    out = nnx.clone(model)
    out.config = dataclasses.replace(
        model.config,
        num_layers=len(layers),
        draft_vocab_size=len(ids_U),
        tied_embeddings=False,
    )
    out.taps = ()
    out.embed_VD = model.embed_VD
    out.blocks = nnx.List([nnx.clone(blocks[layer]) for layer in layers])
    # A tied model has None there, which nnx takes for a static attribute unless told otherwise.
    out.head_DU = nnx.data(nnx.Param(head_VD[jnp.asarray(ids_U)].T))
    return out
