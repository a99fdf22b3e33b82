"""No option that no line reads: every field of a config changes something that can be seen."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec.generate
from models.config import ModelConfig, RopeScaling
from models.layers import rope_frequencies
from models.transformer import Transformer, causal_mask
from parallel.comm import LocalComm
from spec.decode import DecodeState, Settings, spec_step
from spec.drafters import NGramDrafter, View
from spec.generate import Request, begin, finish
from spec.sampling import rows
from spec.verify import RULES
from tests.common import toys

HISTORY = (7, 1, 5, 9, 1, 6, 3, 1, 6, 2, 7, 1)


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def proposal(drafter: NGramDrafter) -> tuple[list[int], list[int]]:
    token_BT = jnp.asarray([HISTORY], jnp.int32)
    state = drafter.init(
        token_BT, jnp.asarray([len(HISTORY)], jnp.int32), None, 16, drafter.depth + 1
    )
    view = View(token_BT[:, -1], None, None, None, None, None, None)
    tree, _, _ = toys.quick(NGramDrafter.propose)(drafter, state, view, None)
    return tree.token_BN[0].tolist(), tree.parent_BN[0].tolist()


NGRAM = NGramDrafter(window=2, min_match=1, matches=2, depth=2, sizes=(1, 4))
NGRAM_CHANGES: dict[str, Any] = {
    "window": 1,
    "min_match": 2,
    "matches": 1,
    "depth": 3,
    "sizes": (1, 3),
    "unsure": 1,
}


def test_ngram_cases_are_complete():
    assert set(NGRAM_CHANGES) == fields(NGramDrafter)


@pytest.mark.parametrize("field", NGRAM_CHANGES)
def test_ngram(field):
    # The longest match has two tokens: only a wider window leaves the lookup unsure.
    base = dataclasses.replace(NGRAM, window=3) if field == "unsure" else NGRAM
    changed = dataclasses.replace(base, **{field: NGRAM_CHANGES[field]})
    assert proposal(changed) != proposal(base)


BASE_REQUEST: dict[str, Any] = {"max_new_tokens": 6}
LETTERS = dict.fromkeys(range(16), b"z") | {7: b"a", 0: b"b", 1: b"c", 4: b"d", 2: b"e"}
# Field -> what it is changed to, and the values besides which it matters.
REQUEST_CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_new_tokens": (5, {"vocab_size": 11}),
    "eos_ids": ((1,), {"vocab_size": 11}),
    "vocab_size": (11, {}),
    "max_length": (4, {"vocab_size": 11}),
    "stop": (("bc",), {"token_bytes": LETTERS.get, "vocab_size": 11}),
    "token_bytes": (lambda i: b"c", {"token_bytes": LETTERS.get, "stop": ("c",), "vocab_size": 11}),
    "temperature": (2.0, {"vocab_size": 11}),
    "top_k": (1, {"vocab_size": 11, "temperature": 8.0}),
    "top_p": (0.1, {"vocab_size": 11, "temperature": 8.0}),
    "rule": ("top_down", {"vocab_size": 11, "temperature": 8.0}),
    "logprobs": (True, {"vocab_size": 11}),
    "seed": (1, {"vocab_size": 11}),
    "run_limit": (1, {"vocab_size": 11}),
    "reserve": (100, {}),
    "compact": (True, {"eos_ids": (1,), "vocab_size": 11}),
}


def seen(request: Request) -> Any:
    """Everything that a request has a say in: completions, keys, sizes, rows that are decoded."""
    model = toys.chain11(16)
    scripts = [(token, *toys.chain11_greedy(token, 60)) for token in (2, 3)]
    drafter = toys.scripted(scripts, toys.chain(2), 16)
    state, settings = begin(model, drafter, [[2], [3]], request)
    keys, sizes = jax.random.key_data(state.key_B).tolist(), state.cache.capacity
    if sizes > 64:  # no other program for the sake of a size
        return sizes
    with pytest.MonkeyPatch.context() as patch:
        passes: list[int] = []
        program = spec.generate._advance

        def counted(*args: Any) -> Any:
            passes.append(args[2].root_B.shape[0])
            return program(*args)

        patch.setattr(spec.generate, "_advance", counted)
        return finish(model, drafter, state, settings, 2, request), keys, sizes, passes


def test_request_cases_are_complete():
    assert set(REQUEST_CHANGES) == fields(Request)


@pytest.mark.parametrize("field", REQUEST_CHANGES)
def test_request(field):
    value, beside = REQUEST_CHANGES[field]
    base = BASE_REQUEST | beside
    assert seen(Request(**(base | {field: value}))) != seen(Request(**base))


class Rolled(LocalComm):
    """A `Comm` that looks up every token a little wrong."""

    def lookup(self, table_VD, token_BT):
        return jnp.roll(table_VD, 1, 0)[token_BT]


SETTINGS_CHANGES: dict[str, Any] = {
    "eos_E": jnp.asarray([7], jnp.int32),
    "run_limit": jnp.asarray(1, jnp.int32),
    "vocab_size": 16,
    "sampling": rows(50.0, 0, 1.0, 1),
    "rule": RULES["naive"],
    "comm": Rolled(),
}
# What a change is made beside; one-row sampling of the default request is greedy.
SETTINGS_BESIDE: dict[str, Any] = {
    "sampling": {"rule": RULES["naive"]},
    "rule": {"sampling": rows(50.0, 0, 1.0, 1)},
}


def test_settings_cases_are_complete():
    assert set(SETTINGS_CHANGES) == fields(Settings)


@pytest.fixture(scope="module")
def one_step():
    """A step of T1 padded to 16 rows, with two right drafts."""
    model = toys.chain11(16)
    drafter = toys.scripted([(2, *toys.chain11_greedy(2, 60))], toys.chain(2), 16)
    state, settings = begin(model, drafter, [[2]], Request(6, vocab_size=11))
    step = toys.quick(spec_step)

    def run(**changes: Any) -> DecodeState:
        return step(model, drafter, state, dataclasses.replace(settings, **changes))[0]

    return run


@pytest.mark.parametrize("field", SETTINGS_CHANGES)
def test_settings(one_step, field):
    beside = SETTINGS_BESIDE.get(field, {})
    one, other = one_step(**beside), one_step(**beside, **{field: SETTINGS_CHANGES[field]})
    assert one.token_BE.tolist() != other.token_BE.tolist()


LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8)
MODEL_CHANGES: dict[str, Any] = {
    "vocab_size": 96,
    "draft_vocab_size": 24,
    "d_model": 32,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 3,
    "head_dim": 4,
    "max_positions": 5,
    "rope_theta": 500.0,
    "rope_scaling": LLAMA3,
    "norm_eps": 1e-2,
    "tied_embeddings": True,
    "attention_bias": True,
}
# Those whose every value has the same parameters, so that only the computation can differ.
SAME_WEIGHTS = ("rope_theta", "rope_scaling", "norm_eps")


def logits(model: Transformer) -> np.ndarray:
    token_BT = jnp.asarray([[1, 2, 3, 4]], jnp.int32)
    position_BT = jnp.arange(4, dtype=jnp.int32)[None]
    return np.asarray(_forward(model, token_BT, position_BT))


@toys.quick
def _forward(model: Transformer, token_BT: jax.Array, position_BT: jax.Array) -> jax.Array:
    return model(token_BT, position_BT, causal_mask(1, 4)).logits_BNV


def test_model_cases_are_complete():
    assert set(MODEL_CHANGES) == fields(ModelConfig)


@pytest.mark.parametrize("field", MODEL_CHANGES)
def test_model(field):
    one, other = toys.tiny(), toys.tiny(**{field: MODEL_CHANGES[field]})
    if field in SAME_WEIGHTS:
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
        assert np.abs(logits(one) - logits(other)).max() > 1e-3
    elif field == "max_positions":
        with pytest.raises(ValueError, match="the limit is 5"):
            begin(other, toys.PLAIN, [[1] * 6], Request(1))
    else:
        shapes = [[x.shape for x in jax.tree.leaves(model)] for model in (one, other)]
        assert shapes[0] != shapes[1]


def test_every_bias_is_added():
    model = toys.tiny(attention_bias=True)
    biased = logits(model)
    for name in ("q_bias_HA", "k_bias_KA", "v_bias_KA", "o_bias_D"):
        other = toys.tiny(attention_bias=True)
        bias = getattr(other.blocks[1].attention, name)
        bias.set_value(jnp.zeros_like(bias[...]))
        assert np.abs(logits(other) - biased).max() > 1e-3, name


SCALINGS: dict[str, Any] = {
    "kind": RopeScaling("linear", 8.0, None, None, None),
    "factor": dataclasses.replace(LLAMA3, factor=2.0),
    "low_freq_factor": dataclasses.replace(LLAMA3, low_freq_factor=0.5),
    "high_freq_factor": dataclasses.replace(LLAMA3, high_freq_factor=2.0),
    "original_positions": dataclasses.replace(LLAMA3, original_positions=64),
}


def test_scaling_cases_are_complete():
    assert set(SCALINGS) == fields(RopeScaling)


@pytest.mark.parametrize("field", SCALINGS)
def test_rope_scaling(field):
    a, b = (
        rope_frequencies(toys.tiny_config(rope_scaling=scaling))
        for scaling in (LLAMA3, SCALINGS[field])
    )
    assert np.abs(a / b - 1).max() > 0.1
