"""The real model: speculation gives plain decoding's tokens and finish reason (make lossless).

Plain decoding always runs alone (batch 1), speculation alone and in batches of 8, float32. A
mismatch whose plain top-2 logit margin is below 1e-3 is a tie that batching may round either way:
it is listed. Any other is a bug.
"""

import fcntl
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec.generate
from experiments.common.setup import encode
from experiments.prompts.load import KINDS, load
from models.transformer import causal_mask
from spec.drafters import ModelDrafter, NGramDrafter, RootDrafter, ScriptedDrafter
from spec.generate import Request, generate
from spec.tree_shapes import expansion

pytestmark = pytest.mark.slow

TOKENS, PER_KIND, TIE = 64, 4, 1e-3


@pytest.fixture(scope="session")
def prompts(smollm2):
    _, tokenizer = smollm2
    chosen = []
    for kind in KINDS:
        ids = encode(tokenizer, [p for p in load(split="eval") if p.kind == kind])
        chosen += sorted(ids, key=len)[:PER_KIND]  # reading is not what is tested
    assert len(chosen) == 24
    # By length: a batch reads as many chunks as its longest prompt has.
    return sorted(chosen, key=len)


@pytest.fixture(scope="session")
def request_(smollm2, prompts):
    _, tokenizer = smollm2
    return Request(
        max_new_tokens=TOKENS,
        eos_ids=tokenizer.eos_ids,
        vocab_size=tokenizer.vocab_size,
        reserve=max(map(len, prompts)) + TOKENS,
    )


@pytest.fixture(scope="session", autouse=True)
def prefill_once():
    """The target reads the same batches for every drafter: it need not each time."""
    read, known = spec.generate.read, {}

    def remembered(target, prompts, request):
        key = str(prompts)
        if key not in known:
            known[key] = read(target, prompts, request)
        return known[key].copy()  # decoding consumes its arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec.generate, "read", remembered)
        yield


@pytest.fixture(scope="session")
def plain(smollm2, prompts, request_, tmp_path_factory, worker_id):
    """Returns a function: tokens and finish reason of all prompts, plainly decoded.

    The first process that asks decodes, the other one waits and reads.
    """
    folder = tmp_path_factory.getbasetemp()
    path = (folder if worker_id == "master" else folder.parent) / "plain.json"

    @functools.cache
    def read():
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                done = [generate(smollm2[0], RootDrafter(), [p], request_)[0] for p in prompts]
                path.write_text(json.dumps([(d.token_ids, d.finish_reason) for d in done]))
            return [(tuple(ids), reason) for ids, reason in json.loads(path.read_text())]

    return read


def drafter_of(name, model, vocab_size, prompts, rows, plain):
    """Builds a drafter for some of the prompts; only a script is made from plain decoding."""
    if name == "ngram":
        return NGramDrafter()
    if name == "self":
        return ModelDrafter(model, expansion((2, 1)), vocab_size)
    # Prompt i is drafted by a drafter whose first guess is right as its (i mod 3)-th child.
    shape = expansion((3, 2, 1, 1))
    depth = shape.depth[-1]
    size = rows.stop - rows.start
    script = np.zeros((size, 1024), np.int32)
    for row, (prompt, (ids, _)) in enumerate(zip(prompts[rows], plain()[rows], strict=True)):
        script[row, : len(prompt) + len(ids)] = [*prompt, *ids]
    numbers = range(rows.start, rows.stop)
    ranks = [[i % 3, i % 2, *[0] * (depth - 2)] for i in numbers]
    return ScriptedDrafter(
        jnp.asarray(script),
        jnp.full(size, depth, jnp.int32),
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


# In an order that keeps two processes busy; scripts need plain decoding, so they come last.
@pytest.mark.parametrize(
    ("name", "batch"),
    [("self", 1), ("scripted", 8), ("ngram", 1), ("self", 8), ("scripted", 1), ("ngram", 8)],
)
def test_equals_plain_decoding(smollm2, prompts, request_, plain, name, batch):
    model, tokenizer = smollm2
    done = []
    for at in range(0, len(prompts), batch):
        rows = slice(at, at + batch)
        drafter = drafter_of(name, model, tokenizer.vocab_size, prompts, rows, plain)
        done += generate(model, drafter, prompts[rows], request_)
    ties = []
    for i, (got, (ids, reason)) in enumerate(zip(done, plain(), strict=True)):
        if got.token_ids == ids and got.finish_reason == reason:
            continue
        pairs = zip(got.token_ids, ids, strict=False)
        index = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
        assert index is not None, f"prompt {i}: {got.finish_reason} != {reason}"
        margin = margin_at(model, prompts[i], ids, index)
        assert margin < TIE, f"prompt {i} differs at token {index}, plain margin {margin}"
        ties.append((i, index, margin))
    total = sum(len(ids) for ids, _ in plain())
    accepted = sum(got.metrics.accepted for got in done)
    print(f"\n{name} batch {batch}: {total} tokens, {accepted} drafts accepted, ties {ties}")
    assert accepted > 0
