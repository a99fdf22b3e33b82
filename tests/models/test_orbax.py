"""Our own checkpoints: exact, from any mesh, cast on purpose, and never a wrong shape."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.checkpoint import load_model, orbax
from models.config import config_to_hf
from tests.common.checkpoint_files import TIED, TINY, WIDE_HEADS, assert_same, leaves, random_model


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [TINY, TIED, WIDE_HEADS])
def test_save_then_load_is_exact(tmp_path, dtype, config):
    model = random_model(config, dtype)
    orbax.save(model, tmp_path / "new" / "folder")
    assert_same(load_model(tmp_path / "new" / "folder", dtype), model)


@pytest.mark.parametrize(
    ("saved", "wanted"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
def test_another_dtype_is_a_cast_of_what_was_saved(tmp_path, saved, wanted):
    model = random_model(TINY, saved)
    orbax.save(model, tmp_path)
    loaded = load_model(tmp_path, wanted)
    assert loaded.dtype == wanted
    before, after = leaves(model), leaves(loaded)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value.astype(np.dtype(wanted)), strict=True)


def test_a_sharded_model_loads_on_one_device(tmp_path):
    plain, model = random_model(TINY), random_model(TINY)
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("fsdp"))
    model.embed_VD[...] = jax.device_put(model.embed_VD[...], spread)
    assert len(model.embed_VD[...].sharding.device_set) == 4
    orbax.save(model, tmp_path)
    loaded = load_model(tmp_path, jnp.float32)
    assert len(loaded.embed_VD[...].sharding.device_set) == 1
    assert_same(loaded, plain)


def test_an_existing_checkpoint_is_not_overwritten(tmp_path):
    model = random_model(TINY)
    orbax.save(model, tmp_path)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        orbax.save(random_model(TINY), tmp_path)
    assert_same(load_model(tmp_path, jnp.float32), model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_ff": 128}, r"blocks\.0\.mlp\.down_FD is \(32, 64\), not \(128, 64\)"),
        ({"num_layers": 3}, r"missing: blocks\.2\.attention"),
        ({"tied_embeddings": True}, "unexpected: head_DU"),
    ],
)
def test_parameters_of_another_config_are_refused(tmp_path, monkeypatch, change, words):
    orbax.save(random_model(TINY), tmp_path)
    other = dataclasses.replace(TINY, **change)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(other)))

    def no_reading(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(orbax.ocp.StandardCheckpointer, "restore", no_reading)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path, jnp.float32)


def test_incomplete_folders_are_refused(tmp_path):
    orbax.save(random_model(TINY), tmp_path)
    config = (tmp_path / "config.json").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"lacks config\.json"):
        load_model(tmp_path, jnp.float32)
    empty = tmp_path / "empty"
    empty.mkdir()
    config.rename(empty / "config.json")
    with pytest.raises(ValueError, match="no checkpoint written by"):
        orbax.load(empty, jnp.float32)
