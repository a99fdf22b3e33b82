"""A drafter in one small file: int8 weights, the ids of its head, no table of its own."""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.checkpoint.parameters import Parameter, build, check, of_model, parameters
from models.config import ModelConfig, config_from_hf, config_to_hf
from models.feature import FeatureModel
from models.stages import decoder_of
from models.transformer import Transformer

_TABLE, _HEAD, _IDS, _SCALE, _CONFIG = "embed_VD", "head_DU", "ids_U", ".scale", "config"
# What a feature model has beside its decoder; a file that holds them holds one. The last, and the
# blocks of the target that it reads, are only there if it reads any.
_FUSION, _MIX, _READS = ("token_DD", "feature_DD"), "mix_IDD", "reads"


class Shipped(NamedTuple):
    """A drafter as read from a file.

    Attributes:
        model: its table is the very array that the caller gave.
        ids_U: int32, token id of every row of its head.
        card: what the file says of itself.
    """

    model: Transformer | FeatureModel
    ids_U: np.ndarray
    card: dict[str, str]


def save(
    model: Transformer | FeatureModel,
    ids_U: np.ndarray,
    path: str | os.PathLike[str],
    card: Mapping[str, str],
) -> None:
    """Writes everything but the embedding table, which the drafter shares with its target.

    A head that is nothing but rows of the table is left out too. Matrices become int8 with one
    float32 scale an output feature (largest magnitude / 127), so each weight is off by at most
    half a scale; vectors stay float32.

    Args:
        model: with an untied head.
        ids_U: int32 ascending, token id of every row of the head.
        path: of the new file; a reader sees all of it or none.
        card: text fields: what it was trained on, by which command, what it reaches.

    Raises:
        ValueError: if head and ids do not fit.
    """
    config = model.config
    if config.tied_embeddings or len(ids_U) != config.draft_vocab_size:
        raise ValueError(
            f"A drafter is shipped with its own head and an id for each row: the head has "
            f"{config.draft_vocab_size} rows (tied: {config.tied_embeddings}), there are "
            f"{len(ids_U)} ids."
        )
    tensors: dict[str, np.ndarray] = {_IDS: np.asarray(ids_U, np.int32)}
    shared_UD = np.asarray(decoder_of(model).embed_VD[...])[ids_U].astype(np.float32)
    for name, weight in _weights(model):
        if name == _HEAD and np.array_equal(weight, shared_UD):
            continue
        if weight.ndim == 1:
            tensors[name] = weight
            continue
        scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-30) / 127
        tensors[name] = np.ascontiguousarray(np.rint(weight / scale).astype(np.int8))
        tensors[name + _SCALE] = np.ascontiguousarray(scale.astype(np.float32))
    if isinstance(model, FeatureModel) and model.reads:
        tensors[_READS] = np.asarray(model.reads, np.int32)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    save_file(tensors, temporary, metadata={**card, _CONFIG: json.dumps(config_to_hf(config))})
    os.replace(temporary, path)


def load(path: str | os.PathLike[str], table_VD: jax.Array, dtype: jax.typing.DTypeLike) -> Shipped:
    """Reads a drafter for the target that `table_VD` belongs to.

    Args:
        path: written by `save`.
        table_VD: the target's embedding table; used as it is if it has `dtype`.
        dtype: of the weights.

    Raises:
        ValueError: if the file is cut off or incomplete, was made for a table of another shape,
            or its ids are not those of the table.
    """
    try:
        with safe_open(path, framework="np") as file:
            card = dict(file.metadata() or {})
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
            config = _config(path, card)
            fused, own_head = _FUSION[0] in shapes, _HEAD in shapes
            states = shapes[_READS][0] + 1 if _READS in shapes else 1
            fusion = _fusion(config, states) if fused else {}
            check(path, _expected(config, own_head) | fusion, shapes, {}, "any")
            if (config.vocab_size, config.d_model) != table_VD.shape:
                raise ValueError(
                    f"{path} drafts for a table of {(config.vocab_size, config.d_model)}, this "
                    f"target's is {table_VD.shape}: use a drafter that was trained for it."
                )
            ids_U = file.get_tensor(_IDS)
            if np.any(np.diff(ids_U) <= 0) or ids_U[0] < 0 or ids_U[-1] >= config.vocab_size:
                raise ValueError(
                    f"{path}: {_IDS} must ascend within 0..{config.vocab_size - 1}, the file is "
                    "damaged."
                )

            def matrix(name: str) -> np.ndarray:
                return file.get_tensor(name).astype(np.float32) * file.get_tensor(name + _SCALE)

            def read(parameter: Parameter) -> np.ndarray | jax.Array:
                if parameter.name == _TABLE:
                    return table_VD
                if parameter.name == _HEAD and not own_head:
                    return parameter.from_file(np.asarray(table_VD[ids_U]))
                if parameter.inputs:
                    return parameter.from_file(matrix(parameter.name))
                return parameter.from_file(file.get_tensor(parameter.name))

            decoder = build(config, read, dtype)
            model: Transformer | FeatureModel = decoder
            if fused:
                token_DD, feature_DD = (jnp.asarray(matrix(name).T, dtype) for name in _FUSION)
                mix_IDD: jax.Array | None = None
                reads: tuple[int, ...] = ()
                if states > 1:
                    D = config.d_model
                    mix_IDD = jnp.asarray(matrix(_MIX).T.reshape(states, D, D), dtype)
                    reads = tuple(int(block) for block in file.get_tensor(_READS))
                model = FeatureModel(decoder, token_DD, feature_DD, mix_IDD, reads)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}.") from error
    if table_VD.dtype == jnp.dtype(dtype):
        decoder.embed_VD[...] = table_VD  # shared, where `build` made a copy
    return Shipped(model, ids_U, card)


def _weights(model: Transformer | FeatureModel) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every parameter but the table: vectors, and matrices as [out, in], float32."""
    for parameter, array in of_model(decoder_of(model)):
        if parameter.name != _TABLE:
            yield parameter.name, parameter.to_file(np.asarray(array, np.float32))
    if isinstance(model, FeatureModel):
        for name in (*_FUSION, *([_MIX] if model.reads else [])):
            weight = np.asarray(getattr(model, name)[...], np.float32)
            yield name, weight.reshape(-1, weight.shape[-1]).T


def _config(path: str | os.PathLike[str], card: dict[str, str]) -> ModelConfig:
    if _CONFIG not in card:
        raise ValueError(f"{path} has no config in its header: it was not written by `save`.")
    return config_from_hf(json.loads(card.pop(_CONFIG)))


def _expected(config: ModelConfig, own_head: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the decoder in the file."""
    out: dict[str, tuple[int, ...]] = {_IDS: (config.draft_vocab_size,)}
    for parameter in parameters(config):
        if parameter.name == _TABLE or (parameter.name == _HEAD and not own_head):
            continue
        out[parameter.name] = parameter.file_shape
        if parameter.inputs:
            out[parameter.name + _SCALE] = (parameter.file_shape[0], 1)
    return out


def _fusion(config: ModelConfig, states: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of what a feature model has beside it; I = `states`."""
    D, out = config.d_model, dict[str, tuple[int, ...]]()
    for name in _FUSION:
        out |= {name: (D, D), name + _SCALE: (D, 1)}
    if states > 1:
        out |= {_READS: (states - 1,), _MIX: (D, states * D), _MIX + _SCALE: (D, 1)}
    return out
