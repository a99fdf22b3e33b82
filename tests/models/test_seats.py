"""Heads that do not divide sit so that they do, and the model says what it said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.seats import on_ranks, seats_of
from models.transformer import Transformer, causal_mask
from parallel.seats import EMPTY, seated, unseated
from tests.common import toys

NINE = {"num_heads": 9, "num_kv_heads": 3}


def heads(ranks, **changes):
    """Query and key/value heads of every rank."""
    config = toys.tiny_config(**changes)
    seats = seats_of(config, ranks)
    out = []
    for letter in "HK":
        every = np.asarray(seats.get(letter, range(config.sizes[letter])))
        out.append(every.reshape(ranks, -1).tolist())
    return list(zip(*out, strict=True))


def test_the_drawing():
    """That of models/seats.py."""
    assert heads(1, **NINE) == [([*range(9)], [0, 1, 2])]
    assert heads(2, **NINE) == [([0, 1, 2, 3, 4, 5], [0, 1]), ([6, 7, 8, -1, -1, -1], [2, -1])]
    assert heads(3, **NINE) == [([0, 1, 2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])]
    assert heads(4, **NINE)[2:] == [([6, 7, 8], [2]), ([-1, -1, -1], [-1])]
    assert heads(6, **NINE)[:3] == [([0, 1], [0]), ([2, -1], [0]), ([3, 4], [1])]
    assert heads(9, **NINE)[2:4] == [([2], [0]), ([3], [1])]
    assert heads(2, num_heads=2, num_kv_heads=1) == [([0], [0]), ([1], [0])]


@pytest.mark.parametrize("K", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("G", [1, 2, 3, 4])
def test_every_query_sits_once_beside_its_own_key(K, G):
    for ranks in range(1, K * G + 1):
        found = []
        for queries, keys in heads(ranks, num_heads=K * G, num_kv_heads=K):
            assert len(queries) % len(keys) == 0
            each = len(queries) // len(keys)
            for seat, query in enumerate(queries):
                if query != EMPTY:
                    assert keys[seat // each] == query // G
                    found.append(query)
        assert found == [*range(K * G)]


def test_what_divides_stays_as_it_is():
    model = toys.tiny(num_heads=8, num_kv_heads=4, vocab_size=96)
    assert seats_of(model.config, 4) == {}
    assert on_ranks(model, 4).config == model.config
    assert set(seats_of(toys.tiny_config(), 2)) == {"V", "U"}
    assert set(seats_of(toys.tiny_config(num_heads=8, vocab_size=96), 4)) == {"K"}


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        (8, {}, "8 devices .* 6 query heads: .* use at most 6"),
        (4, {"d_ff": 3}, "3 feed-forward features"),
        (6, {"vocab_size": 5}, "5 tokens of the vocabulary"),
        (6, {"draft_vocab_size": 4}, "4 rows of the head"),
    ],
)
def test_more_ranks_than_entries_are_refused(ranks, changes, words):
    with pytest.raises(ValueError, match=words):
        seats_of(toys.tiny_config(**changes), ranks)


def test_the_way_back_is_the_transpose():
    tree = {"q_DHA": jnp.arange(48.0).reshape(2, 4, 6), "k_DKA": jnp.arange(24.0).reshape(2, 2, 6)}
    tree["blocks"] = {"k_bias_KA": jnp.arange(24.0).reshape(2, 2, 6)}  # of two blocks
    seats = {"H": (0, 1, EMPTY, 2, 3, EMPTY), "K": (0, 0, 1, 1, EMPTY, 0)}
    there = jax.tree.map(jnp.cos, seated(tree, seats))
    assert there["q_DHA"].shape == (2, 6, 6)
    assert there["blocks"]["k_bias_KA"].shape == (2, 6, 6)
    (wanted,) = jax.vjp(lambda each: seated(each, seats), tree)[1](there)
    for a, b in zip(jax.tree.leaves(unseated(there, seats)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "changes"), [(2, NINE), (4, NINE), (6, NINE), (2, {"num_kv_heads": 1, "d_ff": 65})]
)
def test_the_same_logits(ranks, changes):
    """On one device: empty seats say nothing, copies say what their entry says."""
    model = toys.tiny(**changes, attention_bias=True)
    wide = on_ranks(model, ranks)
    assert wide.config != model.config
    for size in (wide.config.num_heads, wide.config.num_kv_heads, wide.config.d_ff):
        assert size % ranks == 0
    token = jnp.arange(10, dtype=jnp.int32)[None]
    run = toys.quick(Transformer.__call__)
    found = [run(each, token, token, causal_mask(1, 10)).logits_BNV for each in (model, wide)]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
