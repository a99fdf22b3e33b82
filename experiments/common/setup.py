"""Models by name or path, with their tokenizers; shared by all scripts."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from experiments.prompts.prompt import Prompt
from models.checkpoint import load_model
from models.checkpoint.gguf import packaged_smollm2
from models.tokenizer import Tokenizer, load_tokenizer
from models.transformer import Transformer

DEFAULT_TARGET = "smollm2-135m-instruct"
# What we trained, loaded by name: drafters for the default target, files; the code pair, folders.
SHIPPED = pathlib.Path(__file__).parents[1] / "drafters"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer


def default_dtype() -> jnp.dtype:
    """Returns float32 on a CPU (bfloat16 products are 7-8 times slower there), else bfloat16."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def find(name: str) -> pathlib.Path:
    """Returns where a model lies: one of ours by its name, a GGUF file, or a checkpoint folder.

    Raises:
        ValueError: if there is nothing of that name.
    """
    if name == DEFAULT_TARGET:
        return packaged_smollm2()
    path = folder(name)
    if not path.exists():
        raise ValueError(
            f"Model {name!r} is neither a path nor one of {[DEFAULT_TARGET, *_ours()]}: give a "
            ".gguf file or a folder with config.json, safetensors and tokenizer.json."
        )
    return path


def _ours() -> list[str]:
    return sorted(path.name for path in SHIPPED.iterdir() if path.is_dir())


def folder(name: str) -> pathlib.Path:
    """Returns the folder of a model of ours, else `name` as a path."""
    return SHIPPED / name if name in _ours() else pathlib.Path(name)


def load(name: str, dtype: jax.typing.DTypeLike) -> Loaded:
    """Loads the model that `find` finds.

    Raises:
        ValueError: if there is none, or it cannot be read.
    """
    path = find(name)
    # The tokenizer first: it is quick to refuse.
    tokenizer = load_tokenizer(path)
    return Loaded(load_model(path, dtype), tokenizer)


def title(name: str) -> str:
    """Returns the part of a model's path that says what it is, without suffix.

    Of the folder `.../code_target/model`, as a run leaves it, that is `code_target`.
    """
    path = pathlib.Path(name).absolute()
    known = path.suffix in (".gguf", ".safetensors")
    return path.parent.name if path.name == "model" else path.stem if known else path.name


def encode(tokenizer: Tokenizer, prompts: list[Prompt]) -> list[list[int]]:
    """Turns prompts into ids, see `Prompt.encode`."""
    return [prompt.encode(tokenizer) for prompt in prompts]
