"""Float32 is exact; what bfloat16 may do is bounded, not waved through (HO-12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kv_cache import KVCache, commit
from models.transformer import Transformer, causal_mask
from spec.tree_shapes import expansion
from tests import toys

PROMPTS = [[1, 2, 3], [5], list(range(20, 50)), [96, 0]]
N = 200
SHAPES = (toys.UNBALANCED, expansion((2, 2)))


def perfect(sequences, shape):
    """Drafts that follow `sequences` down the deepest path of the last slots."""
    leaf, ranks = shape.size - 1, []
    while leaf:
        ranks.insert(0, shape.rank[leaf])
        leaf = shape.parent[leaf]
    return toys.scripted(sequences, shape, 97, rank=[ranks] * len(sequences), width=256)


def test_float32_is_exact_for_200_tokens():
    """Plain, two trees and the uncached oracle say the same."""
    model = toys.tiny()
    want = toys.plain_uncached(model, PROMPTS, N)
    assert toys.decode(model, toys.PLAIN, PROMPTS, N) == want
    sequences = [(*row, *tokens) for row, (tokens, _) in zip(PROMPTS, want, strict=True)]
    for shape in SHAPES:
        assert toys.decode(model, perfect(sequences, shape), PROMPTS, N) == want


@pytest.fixture(scope="module")
def half() -> tuple[Transformer, Transformer]:
    """A bfloat16 model and its very weights in float32."""
    return toys.tiny(dtype=jnp.bfloat16), jax.tree.map(
        lambda x: x.astype(jnp.float32), toys.tiny(dtype=jnp.bfloat16)
    )


@jax.jit
def whole_logits(model, token_BT):
    """One block of n."""
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return model(token_BT, position_BT, causal_mask(B, T)).logits_BNV


@jax.jit
def stepwise_logits(model, token_BT):
    """n blocks of one, through the cache."""
    B, T = token_BT.shape
    cache = KVCache.empty(model.config, B, T, model.dtype)

    def body(cache, token_B):
        out = model(token_B[:, None], cache.length_B[:, None], causal_mask(B, 1), cache)
        return commit(cache, out.tree_kv, jnp.ones(B, jnp.int32)), out.logits_BNV[:, 0]

    return jax.lax.scan(body, cache, token_BT.T)[1].swapaxes(0, 1)


def assert_narrow(exact_V: np.ndarray, one: int, other: int) -> None:
    """The policy: two rounded runs may differ only where the exact choice is narrow."""
    first, second = np.sort(exact_V)[::-1][:2]
    bound = 2.0**-7 * np.abs(exact_V).max()
    assert first - second < bound, f"{one} or {other}: margin {first - second} is not below {bound}"


def test_bfloat16_differs_only_at_narrow_choices(half):
    """At the first difference between tree and plain the float32 margin is small."""
    low, exact = half
    plain = toys.decode(low, toys.PLAIN, PROMPTS, N)
    sequences = [(*row, *tokens) for row, (tokens, _) in zip(PROMPTS, plain, strict=True)]
    token_BT = np.zeros((len(PROMPTS), 256), np.int32)
    for row, sequence in enumerate(sequences):
        token_BT[row, : len(sequence)] = sequence
    logits = np.asarray(whole_logits(exact, token_BT))
    agreed = []
    drafted = toys.decode(low, perfect(sequences, toys.UNBALANCED), PROMPTS, N)
    for row, prompt in enumerate(PROMPTS):
        pairs = list(zip(plain[row][0], drafted[row][0], strict=True))
        differ = [i for i, (one, other) in enumerate(pairs) if one != other]
        agreed.append(differ[0] if differ else N)
        if differ:
            assert_narrow(logits[row, len(prompt) - 1 + differ[0]], *pairs[differ[0]])
    print(f"bfloat16: tree equals plain for {agreed} of {N} tokens")
    assert max(agreed) > 20


def test_bfloat16_in_one_block_and_in_single_steps(half):
    """The same prefix as 1 x n and n x 1, no drafter: the best token flips at narrow choices only."""
    low, exact = half
    token_BT = np.random.default_rng(0).integers(0, 97, (8, 64)).astype(np.int32)
    one, other = (np.asarray(f(low, token_BT).argmax(-1)) for f in (whole_logits, stepwise_logits))
    logits = np.asarray(whole_logits(exact, token_BT))
    flips = np.argwhere(one != other)
    print(f"bfloat16: {len(flips)} of {one.size} choices differ between one block and single steps")
    for b, t in flips:
        assert_narrow(logits[b, t], one[b, t], other[b, t])
    assert len(flips) < 0.05 * one.size
    float_pair = [np.asarray(f(exact, token_BT)) for f in (whole_logits, stepwise_logits)]
    np.testing.assert_allclose(*float_pair, rtol=1e-4, atol=1e-4)
