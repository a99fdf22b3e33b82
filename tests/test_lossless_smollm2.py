"""The real model: speculation gives plain decoding's tokens and finish reason (make lossless).

Plain decoding always runs alone (batch 1), speculation alone and in batches of 8, float32. A
mismatch whose plain top-2 logit margin is below 1e-3 is a tie that batching may round either way:
it is listed. Any other is a bug.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.prompts.load import KINDS, load
from experiments.setup import encode
from models.transformer import causal_mask
from spec.drafters import ModelDrafter, NGramDrafter, RootDrafter, ScriptedDrafter
from spec.generate import Request, generate, round_up
from spec.tree_shapes import expansion

pytestmark = pytest.mark.slow

TOKENS, PER_KIND, TIE = 64, 4, 1e-3


@pytest.fixture(scope="session")
def prompts(smollm2):
    _, tokenizer = smollm2
    chosen = [
        prompt
        for kind in KINDS
        for prompt in [p for p in load(split="eval") if p.kind == kind][:PER_KIND]
    ]
    assert len(chosen) == 24
    return encode(tokenizer, chosen)


@pytest.fixture(scope="session")
def request_(smollm2, prompts):
    _, tokenizer = smollm2
    return Request(
        max_new_tokens=TOKENS,
        eos_ids=tokenizer.eos_ids,
        vocab_size=tokenizer.vocab_size,
        reserve=max(map(len, prompts)) + TOKENS,
    )


@pytest.fixture(scope="session")
def plain(smollm2, prompts, request_):
    model, _ = smollm2
    return [generate(model, RootDrafter(), [prompt], request_)[0] for prompt in prompts]


def drafter_of(name, model, vocab_size, prompts, plain, first):
    """Builds a drafter for these prompts, the first being number `first` of all."""
    if name == "ngram":
        return NGramDrafter()
    if name == "self":
        return ModelDrafter(model, expansion((2, 1, 1)), vocab_size)
    # Prompt i is drafted by a drafter whose first guess is right as its (i mod 3)-th child.
    shape = expansion((3, 2, 1, 1))
    depth = shape.depth[-1]
    rows = round_up(len(prompts), 1)
    script = np.zeros((rows, 1024), np.int32)
    for row, (prompt, done) in enumerate(zip(prompts, plain, strict=True)):
        whole = [*prompt, *done.token_ids]
        script[row, : len(whole)] = whole
    ranks = [[(first + i) % 3, (first + i) % 2, *[0] * (depth - 2)] for i in range(rows)]
    return ScriptedDrafter(
        jnp.asarray(script),
        jnp.full(rows, depth, jnp.int32),
        jnp.asarray(ranks, jnp.int32),
        vocab_size,
        shape,
    )


def margin_at(model, prompt, tokens, index):
    """Returns how far the best two logits are apart where token `index` was chosen."""
    ids = jnp.asarray([[*prompt, *tokens[:index]]], jnp.int32)
    n = ids.shape[1]
    out = jax.jit(lambda m, t: m(t, jnp.arange(n)[None, :], causal_mask(1, n)).logits_BNV[0, -1])
    best = jax.lax.top_k(out(model, ids), 2)[0]
    return float(best[0] - best[1])


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["ngram", "self", "scripted"])
def test_equals_plain_decoding(smollm2, prompts, request_, plain, name, batch):
    model, tokenizer = smollm2
    ties, accepted = [], 0
    for at in range(0, len(prompts), batch):
        rows = slice(at, at + batch)
        drafter = drafter_of(name, model, tokenizer.vocab_size, prompts[rows], plain[rows], at)
        done = generate(model, drafter, prompts[rows], request_)
        for i, (got, want) in enumerate(zip(done, plain[rows], strict=True), start=at):
            accepted += got.metrics.accepted
            if got.token_ids == want.token_ids and got.finish_reason == want.finish_reason:
                continue
            pairs = zip(got.token_ids, want.token_ids, strict=False)
            index = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
            assert index is not None, f"prompt {i}: {got.finish_reason} != {want.finish_reason}"
            margin = margin_at(model, prompts[i], want.token_ids, index)
            assert margin < TIE, f"prompt {i} differs at token {index}, plain margin {margin}"
            ties.append((i, index, margin))
    total = sum(len(p.token_ids) for p in plain)
    print(f"\n{name} batch {batch}: {total} tokens, {accepted} drafts accepted, ties {ties}")
    assert accepted > 0
