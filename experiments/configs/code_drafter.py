"""The drafter of the code pair: about 1 M parameters, taught by the 13 M target of `code_target`.

    python -m experiments.train --config code_drafter --target out/train/code_target/model

The target reads every batch and gives its distribution; the drafter learns it by forward KL.
Hardware: one CPU core, 33 minutes for 1,500 steps (3.1 million tokens): KL 0.15 nats a token. At
steps 300, 600, 900, 1,200, 1,500, greedy, on 8 beginnings of held-out files: rank-1 success 0.59,
0.74, 0.81, 0.86, 0.84, rank-3 0.78, 0.95, 0.95, 0.97, 0.98, tokens a step of a <3,1,1> tree (4 at
most) 2.5, 3.1, 3.2, 3.3, 3.3. The target repeats itself much, which is easy to learn.
"""

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.common import card, setup
from experiments.common.job import Arguments, Job
from experiments.common.loop import LoopConfig
from experiments.configs import code_target
from experiments.data import bpe, sources
from experiments.data.batches import Batches, Rows
from models.checkpoint import safetensors
from models.losses import Batch, Teacher
from models.stages import join, llama_stages, split
from models.transformer import Transformer
from parallel.stages import Params
from parallel.train import TrainState
from spec.drafters import ModelDrafter
from spec.generate import Request, generate
from spec.metrics import total
from spec.tree_shapes import expansion

ABOUT = "the drafter of code_target, 1 million parameters"
STEPS, BATCH, LENGTH = 1500, 8, 256


@jax.jit
def taught(target: Transformer, batch: Batch) -> Batch:
    """Returns the batch with the target's distribution after every token."""
    logits_BTV = target(batch.token_BT, batch.position_BT, batch.mask()).logits_BNV
    return Batch(
        batch.token_BT,
        batch.position_BT,
        batch.segment_BT,
        batch.label_BT,
        batch.weight_BT,
        Teacher(None, logits_BTV),
    )


def build(asked: Arguments) -> Job:
    """See `experiments.train`."""
    if asked.init is not None:
        raise ValueError(f"--init {asked.init}: this model starts from nothing; leave it out.")
    target = setup.load(asked.target, jnp.float32)
    tokenizer, V = target.tokenizer, target.model.config.vocab_size
    smoke = asked.smoke
    limit, length, batch = (4000, 64, 2) if smoke else (None, LENGTH, BATCH)
    steps = 4 if smoke else asked.steps or STEPS
    shape = code_target.config(V, 128, 3)
    data = asked.data or ("train:stdlib",)
    corpus = sources.load(data, tokenizer, limit)
    # Those that `prompts.beginnings` leaves to tune on.
    prompts = sources.prefixes("held:stdlib", tokenizer, 2 if smoke else 16)[::2]
    request = Request(8 if smoke else 64, tokenizer.eos_ids, tokenizer.vocab_size)

    def evaluate(state: TrainState) -> Mapping[str, float]:
        drafter = ModelDrafter(join(state.params), expansion((3, 1, 1)), tokenizer.vocab_size)
        ids = [tokenizer.encode(text) for text in prompts]
        metrics = total(done.metrics for done in generate(target.model, drafter, ids, request))
        return {
            "tokens_per_step": metrics.tokens_per_step,
            "rank_1": metrics.success_within(1),
            "rank_3": metrics.success_within(3),
        }

    def prepare(params: Params, rows: Any) -> Batch:
        return taught(target.model, rows)

    def export(state: TrainState, out: pathlib.Path) -> pathlib.Path:
        folder = out / "model"
        half: Params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), state.params)
        says = card.told(asked, "code_drafter", ABOUT, data) | card.reached(out, "held_out_")
        safetensors.save(join(half), folder, says)
        for name in bpe.FILES:
            shutil.copyfile(setup.find(asked.target) / name, folder / name)
        return folder

    return Job(
        stages=llama_stages(shape, "forward_kl"),
        params=split(Transformer(shape, nnx.Rngs(0))),
        optimizer=code_target.rising_and_falling(3e-3, steps),
        batches=Batches(Rows(corpus, length, None), batch, seed=0),
        loop=LoopConfig(steps, min(300, steps), min(300, steps), keep=2),
        accumulate=1,
        evaluate=evaluate,
        prepare=prepare,
        export=export,
    )
