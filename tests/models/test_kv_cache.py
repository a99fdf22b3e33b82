"""The cache protocol: commit, insert, the check before work, and prefill in chunks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import LayerKV
from models.kv_cache import KVCache, commit, insert, take_path
from models.prefill import chunk_of, prefill
from models.transformer import causal_mask
from tests.common import toys

B, S, P, K, A, L = 4, 10, 3, 2, 8, 2
CONFIG = toys.tiny_config(num_kv_heads=K, head_dim=A, num_layers=L)


def random_cache(rng, lengths) -> KVCache:
    def arrays():
        return tuple(jnp.asarray(rng.standard_normal((B, K, S, A)), jnp.float32) for _ in range(L))

    return KVCache(arrays(), arrays(), jnp.asarray(lengths, jnp.int32))


def random_path(rng, nodes=P) -> tuple[LayerKV, ...]:
    def array():
        return jnp.asarray(rng.standard_normal((B, nodes, K, A)), jnp.float32)

    return tuple(LayerKV(array(), array()) for _ in range(L))


def committed(cache: KVCache, path, counts) -> list[np.ndarray]:
    """Slot by slot: token p of a row goes behind its length, if it is real and there is room."""
    out = []
    for slots_BKSA, new_BPKA in zip(
        (*cache.k_BKSA, *cache.v_BKSA),
        (*(kv.k_BNKA for kv in path), *(kv.v_BNKA for kv in path)),
        strict=True,
    ):
        slots, new = np.array(slots_BKSA), np.asarray(new_BPKA)
        for row, count in enumerate(counts):
            for p in range(count):
                at = int(cache.length_B[row]) + p
                if at < S:
                    slots[row, :, at] = new[row, p]
        out.append(slots)
    return out


@pytest.mark.parametrize(
    ("lengths", "counts", "after"),
    [
        ([0, 2, 5, 7], [3, 0, 1, 2], [3, 2, 6, 9]),  # ragged, with padding and an idle row
        ([7, 8, 9, 10], [3, 3, 3, 3], [10, 10, 10, 10]),  # 0, 1, 2 and 3 tokens overflow
        ([10, 10, 0, 9], [0, 1, 0, 0], [10, 10, 0, 9]),
    ],
)
def test_commit_appends_behind_each_length(lengths, counts, after):
    """Overflow is dropped: not wrapped to slot 0, not clamped onto the last slot."""
    rng = np.random.default_rng(0)
    cache, path = random_cache(rng, lengths), random_path(rng)
    new = toys.quick(commit)(cache, path, jnp.asarray(counts, jnp.int32))
    assert new.length_B.tolist() == after
    for got, wanted in zip((*new.k_BKSA, *new.v_BKSA), committed(cache, path, counts), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_commit_casts_to_the_cache():
    rng = np.random.default_rng(1)
    cache = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
        random_cache(rng, [0, 1, 2, 3]),
    )
    path = random_path(rng)
    new = commit(cache, path, jnp.full(B, 1, jnp.int32))
    assert new.k_BKSA[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(new.v_BKSA[1][3, :, 3], path[1].v_BNKA[3, 0].astype(jnp.bfloat16))


def test_take_path_gathers_nodes_and_bears_padding():
    tree_kv = random_path(np.random.default_rng(2), nodes=6)
    node_BP = jnp.asarray([[0, 2, 5], [0, 6, 6], [0, 1, 6], [0, 3, 4]], jnp.int32)
    for kv, path in zip(tree_kv, take_path(tree_kv, node_BP), strict=True):
        for whole, part in zip(kv, path, strict=True):
            for b, p in np.argwhere(np.asarray(node_BP) < 6):
                np.testing.assert_array_equal(part[b, p], whole[b, int(node_BP[b, p])])


def test_insert_replaces_one_row():
    rng = np.random.default_rng(3)
    cache = random_cache(rng, [1, 2, 3, 4])
    other = jax.tree.map(lambda x: x[:1], random_cache(rng, [9, 0, 0, 0]))
    new = toys.quick(insert)(cache, jnp.int32(2), other)
    assert new.length_B.tolist() == [1, 2, 9, 4]
    for got, old, row in zip(
        jax.tree.leaves(new), jax.tree.leaves(cache), jax.tree.leaves(other), strict=True
    ):
        np.testing.assert_array_equal(got[2], row[0])
        np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(old, 2, 0))


def test_empty_cache():
    cache = KVCache.empty(CONFIG, B, S, jnp.bfloat16)
    assert cache.capacity == S
    assert [x.shape for x in (*cache.k_BKSA, *cache.v_BKSA)] == [(B, K, S, A)] * 2 * L
    assert cache.k_BKSA[0].dtype == jnp.bfloat16
    assert cache.length_B.tolist() == [0] * B


@pytest.fixture(scope="module")
def model():
    out = toys.tiny()
    out.taps = (0,)
    return out


def one_pass(model, token_BT):
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    out = model(token_BT, position_BT, causal_mask(B, T))
    return out.hidden_BNID, out.tree_kv


CHUNK = chunk_of(1024)


@pytest.mark.parametrize(
    "lengths", [[CHUNK + 44, CHUNK + 1, CHUNK, 1], [2, CHUNK + 2, 5, 0], [1, 0, 1, 1]]
)
def test_chunks_equal_one_pass(model, lengths):
    """Prompts beyond one chunk, up to its edge, of one token, and a padding row."""
    T, capacity = 2 * CHUNK, 2 * CHUNK + 8
    token_BT = np.random.default_rng(4).integers(0, 97, (4, T)).astype(np.int32)
    run = toys.quick(prefill, static_argnums=3)
    cache, hidden_BTID = run(model, token_BT, np.asarray(lengths, np.int32), capacity)
    whole_BTLD, tree_kv = toys.quick(one_pass)(model, token_BT)
    wanted = [max(length - 1, 0) for length in lengths]  # the last token is the first root
    assert cache.length_B.tolist() == wanted
    for row, count in enumerate(wanted):
        np.testing.assert_allclose(hidden_BTID[row, :count], whole_BTLD[row, :count], atol=1e-4)
        assert not np.asarray(hidden_BTID[row, count:]).any()
        for layer, kv in enumerate(tree_kv):
            for slots, made in ((cache.k_BKSA, kv.k_BNKA), (cache.v_BKSA, kv.v_BNKA)):
                got = np.asarray(slots[layer][row]).swapaxes(0, 1)
                np.testing.assert_allclose(got[:count], made[row, :count], atol=1e-4)
                assert not got[count:].any(), "a slot beyond the length was written"


def test_chunks_are_written_in_place(model):
    """XLA:CPU copies no cache between attention, which reads it, and commit, which writes it."""
    T, capacity = 2 * CHUNK, 2 * CHUNK + 8
    arguments = (model, jnp.zeros((1, T), jnp.int32), jnp.ones(1, jnp.int32))
    text = jax.jit(lambda *a: prefill(*a, capacity)).lower(*arguments).compile().as_text()
    K, A = model.config.num_kv_heads, model.config.head_dim
    loops, _ = text.split("\nENTRY ")
    cache = rf"f32\[1,{K},{capacity},{A}\]"
    assert re.search(cache, loops)
    assert not re.search(rf"= {cache}\S* copy\(", loops)


def test_prompts_that_do_not_divide_into_chunks_are_refused(model):
    with pytest.raises(ValueError, match=f"must be at most {CHUNK} or a multiple"):
        prefill(model, jnp.zeros((1, CHUNK + 44), jnp.int32), jnp.ones(1, jnp.int32), 320)
