"""SmolLM2 from one GGUF file gives transformers' logits, in one pass and from the cache."""

import numpy as np
import pytest
from experiments.hf_baseline import load
from experiments.prompts.load import load as load_prompts
from experiments.prompts.load import one_of_each
from sides import (
    ours_in_one_pass,
    ours_step_by_step,
    theirs_in_one_pass,
    theirs_step_by_step,
)

pytestmark = pytest.mark.parity

STEPS = 24
PROMPTS = {prompt.kind: prompt.text for prompt in one_of_each(load_prompts())}
# About 800 tokens: several chunks of prefill, and positions where RoPE's phases are large.
PROMPTS["long"] = "\n\n".join(PROMPTS.values())


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    return load(smollm2_path)


@pytest.mark.parametrize("kind", PROMPTS)
def test_logits_equal_those_of_transformers(smollm2, theirs, kind):
    ours, tokenizer = smollm2
    tokens = tokenizer.encode_chat([{"role": "user", "content": PROMPTS[kind]}])
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
