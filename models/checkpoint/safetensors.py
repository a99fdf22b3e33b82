"""Hugging Face folders: `config.json` and safetensors, in one file or in shards."""

import contextlib
import json
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.checkpoint import config_json
from models.checkpoint.parameters import Parameter, build, check, of_model, parameters
from models.transformer import Transformer

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# A buffer that old versions of transformers saved; it follows from the config.
_IGNORED = "rotary_emb.inv_freq"


def load(folder: str | os.PathLike[str], dtype: jax.typing.DTypeLike) -> Transformer:
    """Loads a model, tensor by tensor.

    If `config.json` says that the embedding table is also the head, the table is used; a head in
    the file is accepted, with a warning if it differs from the table.

    Args:
        folder: with `config.json` and `model.safetensors`, or an index and its shards.
        dtype: of the weights.

    Raises:
        ValueError: if a file is absent or cut off, or the tensors are not exactly those of the
            config; before any weight is read.
    """
    folder = pathlib.Path(folder)
    config = config_json.read(folder)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in _weight_files(folder)]
        # Name -> the file that holds it. Headers only: data is read by get_tensor.
        tensors = {
            name: file
            for file in files
            for name in file.offset_keys()
            if not name.endswith(_IGNORED)
        }
        spare_head = tensors.pop(_HEAD, None) if config.tied_embeddings else None
        dtypes = {name: file.get_slice(name).get_dtype() for name, file in tensors.items()}
        check(
            folder,
            expected={p.hugging_face: p.file_shape for p in parameters(config)},
            found={name: tuple(f.get_slice(name).get_shape()) for name, f in tensors.items()},
            unreadable={name: kind for name, kind in dtypes.items() if kind not in _DTYPES},
            readable=", ".join(_DTYPES),
        )
        if spare_head is not None and not np.array_equal(
            spare_head.get_tensor(_HEAD), tensors[_TABLE].get_tensor(_TABLE)
        ):
            warnings.warn(
                f"{folder} has an {_HEAD} that differs from {_TABLE}, although config.json says "
                "that they are tied: the head is ignored. If it was trained, set "
                "tie_word_embeddings to false.",
                stacklevel=2,
            )

        def read(parameter: Parameter) -> np.ndarray:
            name = parameter.hugging_face
            return parameter.from_file(tensors[name].get_tensor(name))

        return build(config, read, dtype)


def save(
    model: Transformer, folder: str | os.PathLike[str], card: Mapping[str, str] | None = None
) -> None:
    """Writes `config.json` and `model.safetensors`, which transformers reads as well.

    A reader sees the old weights or the new ones, never a part.

    Args:
        model: in any float dtype; the file keeps it.
        folder: created if absent.
        card: text fields for the header of the weights: what they were trained on, what they reach.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        # save_file writes the underlying buffer and would silently lose a transposition.
        parameter.hugging_face: np.ascontiguousarray(parameter.to_file(np.asarray(array)))
        for parameter, array in of_model(model)
    }
    temporary = folder / f"{_WEIGHTS}.tmp"
    # transformers insists on a format
    save_file(tensors, temporary, metadata={**(card or {}), "format": "pt"})
    os.replace(temporary, folder / _WEIGHTS)
    config_json.write(model.config, folder)


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        raise ValueError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}.")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is no index of shards: {error!r}. Download it again.") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{folder} lacks {', '.join(absent)}, {len(absent)} of the {len(names)} shards that "
            f"{_INDEX} lists: download the rest."
        )
    return [folder / name for name in names]


def _open(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(
            f"{path} cannot be read as safetensors: {error}. It may be cut off (it has "
            f"{path.stat().st_size} bytes): download it again."
        ) from error
