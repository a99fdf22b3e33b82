"""SmolLM2 computes what transformers computed; `tests.parity.make_expected` wrote the numbers."""

import hashlib
import json
import pathlib

import jax
import numpy as np
import pytest

from models.transformer import causal_mask
from spec.drafters import NGramDrafter
from spec.generate import Request, generate

EXPECTED = json.loads(
    (pathlib.Path(__file__).parent / "expected" / "smollm2_logits.json").read_text("utf-8")
)
PROMPTS = EXPECTED["prompts"]


def test_the_numbers_come_from_the_installed_file(smollm2_path):
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == EXPECTED["produced_by"]["gguf_sha256"]


@pytest.fixture(scope="module")
def last_logits(smollm2):
    """Logits after each prompt, from one pass over all, padded on the right."""
    ids = [prompt["token_ids"] for prompt in PROMPTS]
    last = np.array([len(row) - 1 for row in ids])
    B, T = len(ids), last.max() + 1
    token_BT = np.array([row + [0] * (T - len(row)) for row in ids], np.int32)
    position_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    forward = jax.jit(lambda model, *inputs: model(*inputs).logits_BNV)
    logits_BTV = forward(smollm2[0], token_BT, position_BT, causal_mask(B, T))
    return np.asarray(logits_BTV)[np.arange(B), last]


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_logits_after_the_prompt(smollm2, last_logits, row):
    prompt, logits_V = PROMPTS[row], last_logits[row]
    assert smollm2[1].encode(prompt["text"]) == prompt["token_ids"]
    for stored in (prompt["top_logits"], prompt["fixed_logits"]):
        ids = [int(token_id) for token_id in stored]
        np.testing.assert_allclose(logits_V[ids], list(stored.values()), rtol=0, atol=1e-3)
    top = [int(token_id) for token_id in prompt["top_logits"]]
    assert np.argsort(-logits_V)[: len(top)].tolist() == top


def test_greedy_continuations(smollm2):
    model, tokenizer = smollm2
    new_tokens = max(len(prompt["greedy_ids"]) for prompt in PROMPTS)
    request = Request(new_tokens, eos_ids=tokenizer.eos_ids, vocab_size=tokenizer.vocab_size)
    # By token tree: what speculation makes of the real model is what transformers said.
    drafter = NGramDrafter(min_match=1, sizes=(8,))
    done = generate(model, drafter, [prompt["token_ids"] for prompt in PROMPTS], request)
    assert any(completion.metrics.accepted for completion in done)
    for completion, prompt in zip(done, PROMPTS, strict=True):
        assert list(completion.token_ids) == prompt["greedy_ids"], prompt["text"]
