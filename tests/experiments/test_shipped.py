"""Drafters of reduced vocabulary in int8 files, and what decodes with them (HO-07 c)."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from experiments.common import drafting, setup
from models.checkpoint import shipped
from models.feature import feature_model
from models.prune import prune
from spec.drafters import ModelDrafter, NGramDrafter
from spec.draws import Children
from spec.generate import Request, generate
from spec.tree_shapes import expansion
from tests.common import toys

CYCLE = np.asarray([0, 1, 2, 4, 7], np.int32)  # what T1 says from 2 on: 7, 0, 1, 4, 2


@pytest.fixture(scope="module")
def target():
    return toys.chain11()


@pytest.fixture(scope="module")
def reduced(target):
    return prune(target, [0], CYCLE)


def drafter(model, ids, shape=(1, 1, 1, 1), how=Children.TOP_K):
    return ModelDrafter(model, expansion(shape), toys.VOCAB1, how, ids)


def test_a_reduced_head_with_its_ids_drafts_as_the_whole(target, reduced):
    (done,) = generate(target, drafter(reduced, jnp.asarray(CYCLE)), [[2]], Request(20))
    assert done.token_ids == toys.chain11_greedy(2, 20)
    assert done.metrics.acceptance_rate == 1


@pytest.mark.parametrize("how", [Children.IID, Children.WITHOUT_REPLACEMENT, Children.TOP_K])
def test_sampled_children_are_ids_too(target, reduced, how):
    request = Request(12, temperature=1.0, seed=5)
    (done,) = generate(target, drafter(reduced, jnp.asarray(CYCLE), (2, 1), how), [[2]], request)
    assert len(done.token_ids) == 12
    assert done.metrics.accepted


def test_without_its_ids_it_is_refused(reduced):
    with pytest.raises(ValueError, match="head has 5 rows, its table 11: ids_U"):
        drafter(reduced, None)


def test_tokens_outside_of_the_head_cost_drafts_not_text(target):
    few = prune(target, [0], CYCLE[:3])
    (done,) = generate(target, drafter(few, jnp.asarray(CYCLE[:3])), [[2]], Request(20))
    assert done.token_ids == toys.chain11_greedy(2, 20)
    assert done.metrics.acceptance_rate < 1


def test_a_head_of_the_tables_rows_is_not_written(tmp_path):
    model = prune(toys.tiny(tied_embeddings=True), [0], CYCLE)
    path = tmp_path / "drafter.safetensors"
    shipped.save(model, CYCLE, path, {})
    with safe_open(path, framework="np") as file:
        assert not [name for name in file.keys() if "head" in name]  # noqa: SIM118
    loaded = shipped.load(path, model.embed_VD[...], jnp.float32).model
    np.testing.assert_array_equal(loaded.head_DU[...], model.head_DU[...])


def test_file(tmp_path):
    model = prune(toys.tiny(attention_bias=True), [1, 0], CYCLE)
    model.head_DU[...] += 0.01
    path = tmp_path / "drafter.safetensors"
    shipped.save(model, CYCLE, path, {"steps": "3"})
    table_VD = model.embed_VD[...]
    loaded = shipped.load(path, table_VD, jnp.float32)
    assert loaded.card == {"steps": "3"}
    assert loaded.ids_U.tolist() == CYCLE.tolist()
    assert loaded.model.config == model.config
    assert loaded.model.embed_VD[...] is table_VD  # one table in memory, the target's
    for name in ("q_DHA", "o_HAD", "q_bias_HA"):
        a = np.asarray(getattr(model.blocks[0].attention, name)[...])
        b = np.asarray(getattr(loaded.model.blocks[0].attention, name)[...])
        assert np.abs(a - b).max() <= np.abs(a).max() / 254 * 1.001
    np.testing.assert_array_equal(
        model.blocks[0].attention.q_bias_HA[...], loaded.model.blocks[0].attention.q_bias_HA[...]
    )
    head = np.asarray(loaded.model.head_DU[...])
    np.testing.assert_allclose(head, model.head_DU[...], atol=np.abs(head).max() / 254 * 1.001)
    # Int8 values survive a second round exactly.
    shipped.save(loaded.model, CYCLE, path, {})
    again = shipped.load(path, table_VD, jnp.float32)
    np.testing.assert_allclose(again.model.head_DU[...], head, rtol=1e-6)


def test_a_feature_model_with_the_blocks_that_it_reads(tmp_path):
    target, path = toys.tiny(), tmp_path / "drafter.safetensors"
    model = feature_model(prune(target, [1], CYCLE), nnx.Rngs(0), (0, 1))
    model.mix_IDD[...] += jax.random.normal(jax.random.key(0), model.mix_IDD.shape)
    shipped.save(model, CYCLE, path, {})
    loaded = shipped.load(path, target.embed_VD[...], jnp.float32).model
    assert loaded.reads == (0, 1)
    for name in ("token_DD", "feature_DD", "mix_IDD"):
        want = np.asarray(getattr(model, name)[...])
        close = np.abs(want).max() / 254 * 1.001
        np.testing.assert_allclose(getattr(loaded, name)[...], want, atol=close)
    states = jax.random.normal(jax.random.key(1), (1, 2, 3, target.config.d_model))
    wanted = model.feature(states)
    np.testing.assert_allclose(loaded.feature(states), wanted, atol=0.05 * np.abs(wanted).max())
    # By its file's name it is drafted with at once: the target hands out what it reads.
    tokens = setup.Loaded(target, SimpleNamespace(vocab_size=toys.VOCAB2))
    made = drafting.make([str(path)], ["2,1"], "top_k", NGramDrafter(), tokens, jnp.float32)
    assert target.taps == (0, 1)
    assert toys.decode(target, made, [[5, 9, 60]], 8) == toys.decode(
        target, toys.PLAIN, [[5, 9, 60]], 8
    )
    drafting.make(["none"], ["1"], "top_k", NGramDrafter(), tokens, jnp.float32)
    assert target.taps == ()
    other = tmp_path / "other.safetensors"
    shipped.save(feature_model(prune(target, [1], CYCLE), nnx.Rngs(0)), CYCLE, other, {})
    model.reads = (0, 2)
    shipped.save(model, CYCLE, path, {})
    with pytest.raises(ValueError, match=r"read blocks \(0, 2\) of the target, which has 0\.\.1"):
        drafting.make([str(path)], ["2,1"], "top_k", NGramDrafter(), tokens, jnp.float32)
    model.reads = (0, 1)
    shipped.save(model, CYCLE, path, {})
    names = [str(path), str(other)]
    with pytest.raises(ValueError, match=r"different blocks of the target, \[\(\), \(0, 1\)\]"):
        drafting.make(names, ["2,1"], "top_k", NGramDrafter(), tokens, jnp.float32)


def test_bad_files(tmp_path, target, reduced):
    path = tmp_path / "drafter.safetensors"
    with pytest.raises(ValueError, match=r"5 rows .* there are 4 ids"):
        shipped.save(reduced, CYCLE[:4], path, {})
    with pytest.raises(ValueError, match="11 rows"):
        shipped.save(target, CYCLE, path, {})
    shipped.save(reduced, CYCLE, path, {})
    with pytest.raises(ValueError, match=r"table of \(11, 16\), this target's is \(12, 16\)"):
        shipped.load(path, jnp.zeros((12, 16)), jnp.float32)
    shipped.save(reduced, CYCLE[::-1].copy(), path, {})
    with pytest.raises(ValueError, match="must ascend"):
        shipped.load(path, target.embed_VD[...], jnp.float32)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        shipped.load(path, target.embed_VD[...], jnp.float32)
    with pytest.raises(ValueError, match="cannot be read"):
        shipped.load(tmp_path / "absent.safetensors", target.embed_VD[...], jnp.float32)


def test_no_such_layer(target):
    with pytest.raises(ValueError, match=r"layers 0\.\.0"):
        prune(target, [1], CYCLE)


def test_what_the_repository_ships():
    """Small, with a card that says what it is, and nothing of the machine it was made on."""
    files = sorted(setup.SHIPPED.rglob("*.safetensors"))
    assert len(files) == 3
    assert sum(path.stat().st_size for path in files) < 40e6
    for path in files:
        with safe_open(path, framework="np") as file:
            card = file.metadata()
        assert {"about", "command", "data", "steps"} <= set(card), path.name
        assert not any(" /" in text or ":/" in text for text in card.values()), path.name
