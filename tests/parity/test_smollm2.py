"""SmolLM2 from one GGUF file gives transformers' logits, in one pass and from the cache."""

import numpy as np
import pytest

from experiments.common import hf_baseline
from experiments.prompts import load as prompt_set
from spec.drafters import RootDrafter
from spec.generate import Request, generate
from tests.parity.sides import (
    ours_in_one_pass,
    ours_step_by_step,
    theirs_in_one_pass,
    theirs_step_by_step,
)

pytestmark = pytest.mark.parity

STEPS = 16
PROMPTS = {prompt.kind: prompt.text for prompt in prompt_set.first_of_each(prompt_set.load())}
# About 800 tokens: several chunks of prefill, and positions where RoPE's phases are large.
PROMPTS["long"] = "\n\n".join(PROMPTS.values())


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    return hf_baseline.load(smollm2_path)


def encode(tokenizer, kind):
    return tokenizer.encode_chat([{"role": "user", "content": PROMPTS[kind]}])


@pytest.mark.parametrize("kind", PROMPTS)
def test_logits_equal_those_of_transformers(smollm2, theirs, kind):
    ours, tokenizer = smollm2
    tokens = encode(tokenizer, kind)
    expected = theirs_in_one_pass(theirs, tokens)
    one_pass = np.abs(ours_in_one_pass(ours, tokens) - expected).max()
    expected = theirs_step_by_step(theirs, tokens, STEPS)
    step_by_step = np.abs(ours_step_by_step(ours, tokens, STEPS) - expected).max()
    print(
        f"\n{kind}: {len(tokens)} tokens, max |logit difference| in one pass {one_pass:.1e}, "
        f"last {STEPS} step by step {step_by_step:.1e}, |logit| <= {np.abs(expected).max():.0f}"
    )
    assert one_pass < 1e-3
    assert step_by_step < 1e-3


def test_the_timed_baseline_writes_the_same_text(smollm2, theirs):
    ours, tokenizer = smollm2
    prompt = encode(tokenizer, "chat")
    timing = hf_baseline.time_greedy(theirs, prompt, max_new_tokens=16)
    print(
        f"\ntransformers: prefill {timing.prefill_ms:.0f} ms, {timing.ms_per_token:.1f} ms a token"
    )
    done = generate(ours, RootDrafter(), [prompt], Request(16, eos_ids=tokenizer.eos_ids))
    assert timing.token_ids == done[0].token_ids
    assert timing.prefill_ms > 0
    assert timing.ms_per_token > 0
