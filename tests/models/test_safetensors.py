"""Hugging Face folders (HO-23) load exactly, or are refused before any weight is read."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.checkpoint import load_model, safetensors
from models.config import config_to_hf
from models.transformer import causal_mask
from tests.common.checkpoint_files import (
    TIED,
    TINY,
    WIDE_HEADS,
    assert_same,
    leaves,
    random_model,
    random_tensors,
    write_folder,
    write_shards,
)


def logits(model, tokens):
    length = len(tokens)
    out = model(jnp.array([tokens]), jnp.arange(length)[None], causal_mask(1, length))
    return np.asarray(out.logits_BNV[0])


def reference_logits(tensors, config, tokens):
    """A LLaMA forward in float64 numpy, on Hugging Face's layout: w is [out, in]."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    A, G = config.head_dim, config.num_heads // config.num_kv_heads

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w[f"{name}.weight"]

    def rope(x):  # [T, heads, A]
        freq = config.rope_theta ** -(np.arange(0, A, 2) / A)
        angle = (np.arange(len(x))[:, None] * freq)[:, None]
        a, b = x[..., : A // 2], x[..., A // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    x = w["model.embed_tokens.weight"][tokens]
    T = len(tokens)
    for i in range(config.num_layers):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{n}_proj").reshape(T, -1, A) for n in "qkv")
        k, v = (np.repeat(z, G, axis=1) for z in (rope(k), v))
        score = np.einsum("thd,shd->hts", rope(q), k) / np.sqrt(A)
        score = np.where(np.tri(T, dtype=bool), score, -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", p, v).reshape(T, -1)
        x = x + linear(mixed, f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(y, f"{at}.mlp.gate_proj")
        up = linear(y, f"{at}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


@pytest.mark.parametrize("config", [TINY, TIED, WIDE_HEADS])
def test_loaded_model_computes_what_the_names_and_shapes_mean(tmp_path, config):
    tensors = random_tensors(config)
    model = load_model(write_folder(tmp_path, config, tensors), jnp.float32)
    assert model.config == config
    tokens = [3, 1, 4, 1, 5, 92]
    np.testing.assert_allclose(
        logits(model, tokens), reference_logits(tensors, config, tokens), rtol=2e-4, atol=2e-4
    )


def test_explicit_head_width_rules_the_shapes(tmp_path):
    tensors = random_tensors(WIDE_HEADS)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (64, 40)
    model = load_model(write_folder(tmp_path, WIDE_HEADS, tensors), jnp.float32)
    assert model.blocks[0].attention.q_DHA.shape == (40, 4, 16)
    assert model.blocks[0].attention.o_HAD.shape == (4, 16, 40)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_every_dtype_is_read_and_cast(tmp_path, stored, wanted):
    tensors = random_tensors(TIED, dtype=stored)
    model = load_model(write_folder(tmp_path, TIED, tensors), wanted)
    table = tensors["model.embed_tokens.weight"]
    assert model.dtype == wanted
    np.testing.assert_array_equal(
        np.asarray(model.embed_VD[...]), table.astype(np.dtype(wanted)), strict=True
    )


def test_shards_load_as_one_file_does(tmp_path):
    tensors = random_tensors(TINY)
    whole = load_model(write_folder(tmp_path / "whole", TINY, tensors), jnp.float32)
    write_shards(tmp_path / "shards", TINY, tensors)
    assert_same(load_model(tmp_path / "shards", jnp.float32), whole)


def test_old_rotary_buffers_are_ignored(tmp_path):
    tensors = random_tensors(TINY)
    plain = load_model(write_folder(tmp_path / "plain", TINY, tensors), jnp.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert_same(load_model(write_folder(tmp_path / "old", TINY, tensors), jnp.float32), plain)


def test_tied_head_may_be_absent_or_equal(tmp_path):
    tensors = random_tensors(TIED)
    absent = load_model(write_folder(tmp_path / "absent", TIED, tensors), jnp.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    equal = load_model(write_folder(tmp_path / "equal", TIED, tensors), jnp.float32)
    assert absent.head_DU is None
    assert_same(absent, equal)


def test_tied_model_with_another_head_warns_and_uses_the_table(tmp_path):
    tensors = random_tensors(TIED)
    plain = load_model(write_folder(tmp_path / "plain", TIED, tensors), jnp.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    folder = write_folder(tmp_path / "differs", TIED, tensors)
    with pytest.warns(UserWarning, match="the head is ignored"):
        assert_same(load_model(folder, jnp.float32), plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [TINY, TIED, WIDE_HEADS])
def test_save_then_load_is_exact(tmp_path, config, dtype):
    model = random_model(config, dtype)
    safetensors.save(model, tmp_path / "new" / "folder")
    assert_same(load_model(tmp_path / "new" / "folder", dtype), model)
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_save_writes_the_names_and_layout_of_hugging_face(tmp_path):
    tensors = random_tensors(WIDE_HEADS)
    model = load_model(write_folder(tmp_path / "in", WIDE_HEADS, tensors), jnp.float32)
    safetensors.save(model, tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name, strict=True)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = random_model(TIED)
    safetensors.save(model, tmp_path)

    def half_written(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        safetensors.save(random_model(TIED, seed=1), tmp_path)
    assert_same(load_model(tmp_path, jnp.float32), model)


@pytest.fixture
def refused(monkeypatch):
    """Asserts that a folder is refused with a message, before weights are read."""

    def no_reading(*_):
        raise AssertionError("weights were read")

    def refused(folder, *words):
        monkeypatch.setattr(safetensors, "build", no_reading)
        with pytest.raises(ValueError, match=str(folder)) as caught:
            load_model(folder, jnp.float32)
        for word in words:
            assert word in str(caught.value)

    return refused


def test_untied_model_without_head_is_refused(tmp_path, refused):
    tensors = random_tensors(TINY)
    del tensors["lm_head.weight"]
    refused(write_folder(tmp_path, TINY, tensors), "missing: lm_head.weight")


def test_everything_wrong_is_named_at_once(tmp_path, refused):
    tensors = random_tensors(TINY)
    del tensors["model.norm.weight"]
    tensors["model.extra"] = np.ones(2, np.float32)
    up = "model.layers.1.mlp.up_proj.weight"
    tensors[up] = tensors[up].T
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int8)
    refused(
        write_folder(tmp_path, TINY, tensors),
        "missing: model.norm.weight",
        "unexpected: model.extra",
        f"of wrong shape: {up} is (64, 32), not (32, 64)",
        "of a dtype other than F32, F16, BF16: model.embed_tokens.weight (I8)",
    )


def test_long_lists_of_tensors_are_cut(tmp_path, refused):
    three = dataclasses.replace(TINY, num_layers=3)
    refused(write_folder(tmp_path, three, random_tensors(TINY)), "and 4 more")


def test_an_absent_shard_is_named(tmp_path, refused):
    files = write_shards(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / files[1]).unlink()
    refused(tmp_path, files[1], "1 of the 3 shards")


@pytest.mark.parametrize("index", ["{", "[]", '{"metadata": {}}'])
def test_a_broken_index_is_refused(tmp_path, refused, index):
    write_shards(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refused(tmp_path, "is no index of shards")


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_cut_off_file_is_refused(tmp_path, refused, keep):
    file = write_folder(tmp_path, TINY, random_tensors(TINY)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, "cut off")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "lacks config.json"),
        ("{", "cannot be used"),
        ('{"model_type": "opt"}', "'opt'"),
    ],
)
def test_a_config_that_does_not_serve_is_refused(tmp_path, refused, config, words):
    write_folder(tmp_path, TINY, random_tensors(TINY))
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    refused(tmp_path, words)


def test_rope_given_twice_must_agree(tmp_path, refused):
    """`rope_parameters` and the older `rope_scaling`: the peers disagree on which one counts."""
    write_folder(tmp_path, TINY, random_tensors(TINY))
    file = tmp_path / "config.json"
    linear = {"rope_type": "linear", "factor": 2.0}
    raw = json.loads(file.read_text()) | {"rope_scaling": linear, "rope_parameters": linear}
    file.write_text(json.dumps(raw))
    load_model(tmp_path, jnp.float32)
    file.write_text(json.dumps(raw | {"rope_parameters": linear | {"factor": 4.0}}))
    refused(tmp_path, "RoPE twice", "remove one")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt", "model.pkl"])
def test_pickled_weights_are_refused(tmp_path, refused, name):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(TINY)))
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    refused(tmp_path, "nothing is ever unpickled", "convert them to safetensors")
    refused(tmp_path / name, "nothing is ever unpickled")


def test_an_absent_path_is_said_to_be_absent(tmp_path, refused):
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path / "nowhere.gguf", "does not exist")


def test_loaded_weights_are_no_view_of_the_file(tmp_path):
    tensors = random_tensors(TIED)
    file = write_folder(tmp_path, TIED, tensors) / "model.safetensors"
    model = load_model(tmp_path, jnp.float32)
    before = jax.tree.map(np.array, leaves(model))
    with file.open("r+b") as opened:  # in place, so that a mapping of the file would see it
        opened.seek(-64, 2)
        opened.write(b"\x7f" * 64)
    jax.tree.map(np.testing.assert_array_equal, leaves(model), before)
