"""The reference tree attention against a dense float64 softmax (HO-20)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tree_attention
from tests.common import toys

QUERIES, KV = (1, 3, 7, 13), (1, 17, 129, 384, 400)
WIDTHS, HEADS = (16, 64, 80, 128), ((6, 2), (7, 1), (12, 4), (28, 4))
EVERY = list(itertools.product(QUERIES, KV, WIDTHS, HEADS))
# Ten of the 320, in which every value occurs at least twice.
SOME = [(QUERIES[i % 4], KV[i % 5], WIDTHS[i // 2 % 4], HEADS[(i + i // 4) % 4]) for i in range(10)]
attend = toys.quick(lambda *args: tree_attention(*args, implementation="reference")[0])


def dense(
    q_BNHA, k_BKSA, v_BKSA, length_B, tree_k_BMKA, tree_v_BMKA, mask_BNM, with_lse=False
):  # fmt: skip
    """One query and one head at a time: gather what it sees, softmax, mix."""
    q, ck, cv, tk, tv = (
        np.asarray(x, np.float64) for x in (q_BNHA, k_BKSA, v_BKSA, tree_k_BMKA, tree_v_BMKA)
    )
    length, mask = np.asarray(length_B), np.asarray(mask_BNM)
    B, N, H, A = q.shape
    group = H // ck.shape[1]
    out, lse = np.zeros((B, N, H, A)), np.full((B, N, H), -np.inf)
    for b, n, h in np.ndindex(B, N, H):
        kv = h // group
        keys = np.concatenate([ck[b, kv, : length[b]], tk[b, mask[b, n], kv]])
        values = np.concatenate([cv[b, kv, : length[b]], tv[b, mask[b, n], kv]])
        if len(keys):
            score = keys @ q[b, n, h] / np.sqrt(A)
            weight = np.exp(score - score.max())
            out[b, n, h] = weight @ values / weight.sum()
            lse[b, n, h] = score.max() + np.log(weight.sum())
    return (out, lse) if with_lse else out


def inputs(rng, N, S, A, H, K, M=None, dtype=jnp.float32, batch=3):
    """Rows of length 0, S // 2 and S; the first query of the row of length 0 sees nothing."""
    M = N if M is None else M

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    tree = toys.random_tree(rng, M, 9, batch=batch)
    mask_BNM = toys.walked_mask(tree)[:, M - N :]
    mask_BNM[0, 0] = False
    length_B = jnp.asarray([0, S // 2, S][:batch], jnp.int32)
    return (
        normal(batch, N, H, A),
        normal(batch, K, S, A),
        normal(batch, K, S, A),
        length_B,
        normal(batch, M, K, A),
        normal(batch, M, K, A),
        jnp.asarray(mask_BNM),
    )


def check(case, dtype, tolerance, run=attend):
    N, S, A, (H, K) = case
    args = inputs(np.random.default_rng(N * 1000 + S), N, S, A, H, K, dtype=dtype)
    out = run(*args)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float64), dense(*args), rtol=tolerance, atol=tolerance
    )
    assert not np.asarray(out[0, 0], np.float32).any(), "a blind query gives zeros"


def test_some_shapes_hold_every_value_twice():
    for column, values in zip(zip(*SOME, strict=True), (QUERIES, KV, WIDTHS, HEADS), strict=True):
        assert min(column.count(value) for value in values) >= 2


@pytest.mark.parametrize("case", SOME, ids=str)
def test_equals_dense_float64(case):
    check(case, jnp.float32, 1e-5)


@pytest.mark.parametrize("case", SOME[::2], ids=str)
def test_bfloat16_equals_dense_float64(case):
    check(case, jnp.bfloat16, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("N", QUERIES)
@pytest.mark.parametrize("S", KV)
def test_every_shape(N, S):
    for case in EVERY:
        if case[:2] == (N, S):
            check(case, jnp.float32, 1e-5, jax.jit(lambda *args: tree_attention(*args)[0]))
            check(case, jnp.bfloat16, 2e-2, jax.jit(lambda *args: tree_attention(*args)[0]))


def test_without_a_cache():
    """Training: S = 0 and a lower-triangular mask."""
    args = inputs(np.random.default_rng(0), 7, 0, 16, 6, 2)
    np.testing.assert_allclose(attend(*args), dense(*args), rtol=1e-5, atol=1e-5)


def test_grown_level_by_level():
    """M > N: each level's queries, with the K/V of all levels before, give what one call gives."""
    rng = np.random.default_rng(5)
    q, k, v, length, tree_k, tree_v, _ = inputs(rng, 8, 17, 16, 6, 2)
    mask = toys.walked_mask(toys.random_tree(rng, 8, 9, batch=3))
    whole = attend(q, k, v, length, tree_k, tree_v, mask)
    for first, last in ((0, 1), (1, 4), (4, 8)):
        part = (q[:, first:last], k, v, length, tree_k[:, :last], tree_v[:, :last])
        seen = mask[:, first:last, :last]
        level = attend(*part, seen)
        np.testing.assert_allclose(level, dense(*part, seen), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(level, whole[:, first:last], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, 1e30])
def test_unused_cache_slots_do_not_leak(rubbish):
    args = list(inputs(np.random.default_rng(1), 3, 17, 16, 6, 2))
    clean = attend(*args)
    unused = np.arange(17)[None, :] >= np.asarray(args[3])[:, None]
    for i in (1, 2):
        array = np.array(args[i])
        array[np.broadcast_to(unused[:, None, :, None], array.shape)] = rubbish
        args[i] = jnp.asarray(array)
    np.testing.assert_array_equal(attend(*args), clean)


def test_gradient_is_finite_where_a_query_sees_nothing():
    args = list(inputs(np.random.default_rng(2), 7, 17, 16, 6, 2))
    args[3] = args[3].at[1].set(0)  # an empty cache beside a seeing query, too

    def loss(q, k, v, tree_k, tree_v):
        reference = {"implementation": "reference"}  # what training asks for: the others have none
        out, _ = tree_attention(q, k, v, args[3], tree_k, tree_v, args[6], **reference)
        return jnp.sum(jnp.sin(out))

    arrays = [args[i] for i in (0, 1, 2, 4, 5)]
    grads = toys.quick(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*arrays)
    for grad in grads:
        assert np.isfinite(grad).all()
    assert not np.asarray(grads[0][0, 0]).any(), "what sees nothing has no gradient"
    assert all(np.abs(grad).max() > 1e-3 for grad in grads)


def test_large_scores_do_not_overflow():
    """exp(score) alone would be inf; the prefix and the tree each hold the maximum once."""
    args = list(inputs(np.random.default_rng(3), 3, 17, 16, 6, 2))
    for i in (1, 4):
        big = list(args)
        big[i] = args[i] * 300
        np.testing.assert_allclose(attend(*big), dense(*big), rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_are_refused():
    args = inputs(np.random.default_rng(4), 1, 1, 16, 3, 2)
    with pytest.raises(ValueError, match="3 query heads do not divide into 2"):
        tree_attention(*args)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (1, "k_BKSA has shape"),
        (2, "v_BKSA has shape"),
        (4, "tree_k_BMKA has shape"),
        (5, "tree_v_BMKA has shape"),
        (6, "mask_BNM has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(argument, words):
    args = list(inputs(np.random.default_rng(4), 3, 5, 16, 6, 2))
    args[argument] = args[argument][..., :-1]
    if argument == 4:  # M is read off it, so the mask alone would be blamed
        args[argument] = args[argument][:, :, :1]
    with pytest.raises(ValueError, match=words):
        tree_attention(*args)
