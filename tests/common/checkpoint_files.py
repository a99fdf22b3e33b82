"""Small models and the files that hold them, for the tests of every checkpoint format."""

import dataclasses
import json

import gguf
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from models.checkpoint.parameters import build, parameters
from models.config import config_to_hf
from models.presets import preset

TINY = dataclasses.replace(
    preset("llama-68m"),
    vocab_size=96,
    draft_vocab_size=96,
    d_model=64,
    d_ff=32,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
)
TIED = dataclasses.replace(TINY, tied_embeddings=True)
# Head width given, not hidden / heads = 10; and biases, as in transformers' attention_bias.
WIDE_HEADS = dataclasses.replace(
    TINY, d_model=40, num_heads=4, num_kv_heads=4, head_dim=16, attention_bias=True
)


def random_model(config, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return build(config, lambda p: rng.standard_normal(p.shape), dtype)


def leaves(model):
    """Parameter path -> values."""
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.split(model)[1])}


def assert_same(one, other):
    assert one.config == other.config
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg=str(path), strict=True)


def random_tensors(config, names="hugging_face", dtype=np.float32):
    """Values for every tensor of a file, under the names of one format and in file layout."""
    rng = np.random.default_rng(0)
    return {
        getattr(p, names): (0.3 * rng.standard_normal(p.file_shape)).astype(dtype)
        for p in parameters(config)
    }


def write_folder(folder, config, tensors, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / name)
    return folder


def write_shards(folder, config, tensors, count=3):
    """Spreads tensors over several files with an index; returns the files' names."""
    names = sorted(tensors)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        write_folder(folder, config, {name: tensors[name] for name in names[i::count]}, file)
    index = {"weight_map": {name: files[i % count] for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def gguf_metadata(config):
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_layers,
        "llama.embedding_length": config.d_model,
        "llama.feed_forward_length": config.d_ff,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.context_length": config.max_positions,
        "llama.vocab_size": config.vocab_size,
    }


def write_gguf(path, values, tensors):
    """Writes a GGUF file. A tensor is an array, or a pair of raw bytes and their type.

    The type of a metadata value follows Python's; a list is of strings or of whole numbers.
    """
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    adders = {
        str: writer.add_string,
        float: writer.add_float32,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in values.items():
        if key != "general.architecture":
            adders[type(value)](key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
