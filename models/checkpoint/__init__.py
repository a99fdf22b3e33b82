"""How do weights come in and go out? GGUF, safetensors and Orbax, all through one table."""

import os
import pathlib

import jax

from models.checkpoint import gguf, orbax, safetensors
from models.transformer import Transformer


def load_model(path: str | os.PathLike[str], dtype: jax.typing.DTypeLike) -> Transformer:
    """Loads a model from any format that we read, told apart by what lies at `path`.

    Args:
        path: a `.gguf` file, a Hugging Face folder with safetensors, or a folder that
            `orbax.save` wrote.
        dtype: of the weights.

    Raises:
        ValueError: if there is nothing we read, or it does not hold exactly one whole model.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf" and path.is_file():
        return gguf.load(path, dtype)
    if orbax.is_checkpoint(path):
        return orbax.load(path, dtype)
    if any(path.glob("*.safetensors*")):
        return safetensors.load(path, dtype)
    raise ValueError(
        f"No model at {path}{'' if path.exists() else ', which does not exist'}. Accepted: a .gguf "
        "file; a folder with config.json and model.safetensors (or shards and their index); a "
        "folder written by models.checkpoint.orbax.save. Pickled weights (pytorch_model.bin, .pt, "
        ".pkl) are refused: nothing is ever unpickled here, so convert them to safetensors."
    )
