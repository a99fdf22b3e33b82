"""A small language model of Python code, the target of `code_drafter`: 13 M parameters.

    python -m experiments.train --config code_target

Data: Python's standard library, every 16th file held out; a tokenizer of 4,096 tokens is trained on
the rest first. The run's folder gets `model/`, a checkpoint folder that `--target` takes. Hardware:
one CPU core, 57 minutes for 1,200 steps (2.5 of the 3.3 million tokens): loss 3.2 nats a token in
the last 50 steps, 3.5 on the beginnings of 32 held-out files (computed afterwards, for the shipped
weights). It was still falling: more steps are the first thing to try.
"""

import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.common import card
from experiments.common.job import Arguments, Job
from experiments.common.loop import LoopConfig
from experiments.data import bpe, sources
from experiments.data.batches import Batches, Rows
from experiments.data.corpus import Corpus, Document
from models.checkpoint import safetensors
from models.config import ModelConfig
from models.stages import join, llama_stages, split
from models.transformer import Transformer
from parallel.stages import Params, forward_loss
from parallel.train import TrainState

ABOUT = "a model of Python code, 13 million parameters"
VOCAB = 4096
STEPS, BATCH, LENGTH = 1200, 8, 256


def config(vocab_size: int, d_model: int, layers: int) -> ModelConfig:
    """Returns the shape of both models of the pair: heads of 64, one kv head for two."""
    return ModelConfig(
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        d_model=d_model,
        d_ff=d_model * 8 // 3 // 64 * 64,
        num_layers=layers,
        num_heads=d_model // 64,
        num_kv_heads=d_model // 128,
        head_dim=64,
        max_positions=2048,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-5,
        tied_embeddings=True,
        attention_bias=False,
    )


def rising_and_falling(rate: float, steps: int) -> optax.GradientTransformation:
    """Returns AdamW with clipping, warm-up and a cosine to a tenth of the highest rate."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, min(200, steps // 2), steps, end_value=rate / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def build(asked: Arguments) -> Job:
    """See `experiments.train`."""
    if asked.init is not None:
        raise ValueError(f"--init {asked.init}: this model starts from nothing; leave it out.")
    folder = asked.out / "model"
    smoke = asked.smoke
    data = asked.data or ("train:stdlib",)
    tokenizer = bpe.trained(folder, sources.texts(data), 300 if smoke else VOCAB)
    limit, length, batch = (4000, 64, 2) if smoke else (None, LENGTH, BATCH)
    steps = 4 if smoke else asked.steps or STEPS
    shape = config(tokenizer.vocab_size, 128, 1) if smoke else config(VOCAB, 384, 7)
    # The beginnings of many files: whole ones would be a few, and one may be a table of data.
    count = 4 if smoke else 32
    beginnings = sources.prefixes("held:stdlib", tokenizer, count, length + length // 8)
    held = Corpus.of(Document(tokenizer.encode(text)[:length]) for text in beginnings)
    stages = llama_stages(shape)
    mean_loss = jax.jit(lambda params, rows: forward_loss(stages, params, rows))
    judged = Batches(Rows(held, length, None), count - 1, seed=0)[0]

    def evaluate(state: TrainState) -> Mapping[str, float]:
        loss, weight = mean_loss(state.params, judged)
        return {"held_out_loss": float(loss / weight)}

    def export(state: TrainState, out: pathlib.Path) -> pathlib.Path:
        half: Params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), state.params)
        says = card.told(asked, "code_target", ABOUT, data) | card.reached(out)
        safetensors.save(join(half), folder, says)
        return folder

    return Job(
        stages=stages,
        params=split(Transformer(shape, nnx.Rngs(0))),
        optimizer=rising_and_falling(2e-3, steps),
        batches=Batches(Rows(sources.load(data, tokenizer, limit), length, None), batch, seed=0),
        loop=LoopConfig(steps, min(200, steps), min(200, steps), keep=2),
        accumulate=1,
        evaluate=evaluate,
        prepare=None,
        export=export,
    )
