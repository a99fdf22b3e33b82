"""What the training of every drafter shares: target, data, the real metric, the exported file.

The teacher is the target itself, at every token of the data: its states are computed once, and its
distribution over the drafter's head follows from them in every batch. Table and head are the
target's own and stay as they are, so a drafter is as small as its blocks.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common import card, setup
from experiments.common.job import Arguments, Job
from experiments.common.loop import LoopConfig
from experiments.data import sources
from experiments.data.batches import Batches, Rows
from experiments.data.corpus import Corpus, frequent_tokens, row_of_token
from experiments.data.features import HiddenRows, hidden_states
from experiments.prompts import load as prompt_set
from models.checkpoint import shipped
from models.feature import FeatureModel
from models.stages import HEAD, TABLE, is_frozen, join, llama_stages, split
from models.transformer import Transformer
from parallel.stages import Stages
from parallel.train import TrainState
from spec.drafters import Drafter, FeatureDrafter, ModelDrafter
from spec.generate import Request, generate
from spec.metrics import total
from spec.tree_shapes import TreeShape, expansion

FROZEN = (TABLE, HEAD)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of a run.

    Attributes:
        draft_vocab: U, rows of the drafter's head.
        length: T, tokens of a row.
        batch: rows of a step.
        steps: optimiser steps.
        warm_up: steps over which the learning rate rises; then it falls as a cosine to 0.
        rate: highest learning rate of AdamW.
        every: steps between checkpoints, and between evaluations.
        evaluated: tokens decoded of each prompt in an evaluation.
    """

    draft_vocab: int
    length: int
    batch: int
    steps: int
    warm_up: int
    rate: float
    every: int
    evaluated: int

    def changed(self, asked: Arguments) -> "Recipe":
        """Returns the numbers after what the command line says."""
        recipe = dataclasses.replace(self, steps=asked.steps) if asked.steps else self
        if not asked.smoke:
            return recipe
        return dataclasses.replace(
            recipe, draft_vocab=128, length=64, batch=2, steps=4, every=4, evaluated=8
        )


@dataclasses.dataclass(frozen=True)
class Material:
    """The target and what its drafter reads.

    Attributes:
        asked: what the command line says.
        target: the model and its tokenizer.
        corpus: its tokens.
        data: where they are from.
    """

    asked: Arguments
    target: setup.Loaded
    corpus: Corpus
    data: tuple[str, ...]

    def ids(self, size: int) -> np.ndarray:
        """Returns the ids of the most frequent tokens, the end of sequence among them."""
        return frequent_tokens(self.corpus, size, self.target.tokenizer.eos_ids)

    def rows(self, length: int, ids_U: np.ndarray) -> HiddenRows:
        """Cuts the corpus into rows labelled by the drafter's head, with the target's states.

        These are kept beside the run's folder, for all runs on the same tokens.
        """
        model = self.target.model
        rows = Rows(self.corpus, length, row_of_token(ids_U, model.config.vocab_size))
        taps = "".join(f"-{block}" for block in model.taps)
        name = f"states-{self.corpus.fingerprint()}-{length}{taps}.npy"
        return HiddenRows(rows, hidden_states(rows, model, self.asked.out.parent / name))


def material(asked: Arguments) -> Material:
    """Loads the target and the data, by default the standard library's text."""
    target = setup.load(asked.target, jnp.float32)
    data = asked.data or ("text:stdlib",)
    corpus = sources.load(data, target.tokenizer, limit=20_000 if asked.smoke else None)
    return Material(asked, target, corpus, data)


def begin(
    of: Material, draft_vocab: int, kind: type, new: Callable[[np.ndarray], Any]
) -> tuple[Any, Any]:
    """Returns a drafter and the int32 ids of its head: an exported one, or `new(ids_U)`.

    Raises:
        ValueError: if the exported one cannot be read or is of another class than `kind`.
    """
    if of.asked.init is None:
        ids_U = of.ids(draft_vocab)
        return new(ids_U), ids_U
    found = shipped.load(of.asked.init, of.target.model.embed_VD[...], jnp.float32)
    if type(found.model) is not kind:
        raise ValueError(
            f"--init {of.asked.init} is a {type(found.model).__name__}, this configuration trains "
            f"a {kind.__name__}: name a file that it exported itself."
        )
    return found.model, found.ids_U


def evenly(num_layers: int, kept: int) -> tuple[int, ...]:
    """Returns `kept` layers of a model, the first and the last among them (the last, if one)."""
    if kept == 1:
        return (num_layers - 1,)
    return tuple(round(i * (num_layers - 1) / (kept - 1)) for i in range(kept))


def drafter(
    model: Transformer | FeatureModel, shape: TreeShape, vocab_size: int, ids_U: np.ndarray
) -> Drafter:
    """Returns the drafter that runs `model`, with top-k children."""
    if isinstance(model, FeatureModel):
        return FeatureDrafter(model, shape, vocab_size, jnp.asarray(ids_U))
    return ModelDrafter(model, shape, vocab_size, ids_U=jnp.asarray(ids_U))


def job(
    of: Material,
    model: Transformer | FeatureModel,
    ids_U: np.ndarray,
    recipe: Recipe,
    prepare: Callable[[Stages, Any, Any], Any],
    config: str,
    about: str,
) -> Job:
    """Returns the run: forward KL with AdamW, evaluated by decoding `dev` prompts.

    Args:
        of: target and data.
        model: before the first step; its table and head are the target's.
        ids_U: token ids of its head.
        recipe: see `Recipe`.
        prepare: `(stages, params, batch) -> batch`: what the model reads beside tokens.
        config: its file in experiments/configs, for the card of the exported file.
        about: what it is, in words, for the card too.
    """
    stages = llama_stages(model.config, "forward_kl", frozen=FROZEN)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, recipe.rate, min(recipe.warm_up, recipe.steps // 2), recipe.steps
    )
    learn = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01)
    )
    optimizer = optax.partition({True: optax.set_to_zero(), False: learn}, _frozen_leaves)
    prompts = prompt_set.first_of_each(prompt_set.load(split="dev"))[
        : 1 if of.asked.smoke else None
    ]
    ids = setup.encode(of.target.tokenizer, prompts)
    vocab = of.target.tokenizer.vocab_size
    request = Request(recipe.evaluated, eos_ids=of.target.tokenizer.eos_ids, vocab_size=vocab)
    shape = expansion((4, 1, 1))

    def evaluate(state: TrainState) -> Mapping[str, float]:
        mine = drafter(join(state.params), shape, vocab, ids_U)
        metrics = total(each.metrics for each in generate(of.target.model, mine, ids, request))
        return {
            "tokens_per_step": metrics.tokens_per_step,
            "rank_1": metrics.success_within(1),
            "rank_4": metrics.success_within(4),
        }

    def export(state: TrainState, folder: pathlib.Path) -> pathlib.Path:
        path = folder / "drafter.safetensors"
        told = card.told(of.asked, config, f"{about}, for {setup.title(of.asked.target)}", of.data)
        says = told | _named(recipe) | card.reached(folder, "dev_")
        shipped.save(join(state.params), ids_U, path, says)
        return path

    return Job(
        stages=stages,
        params=split(model),
        optimizer=optimizer,
        batches=Batches(of.rows(recipe.length, ids_U), recipe.batch, seed=0),
        loop=LoopConfig(recipe.steps, recipe.every, recipe.every, keep=2),
        accumulate=1,
        evaluate=evaluate,
        prepare=jax.jit(lambda params, batch: prepare(stages, params, batch)),
        export=export,
    )


def _frozen_leaves(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: is_frozen(path, FROZEN), params)


def _named(recipe: Recipe) -> dict[str, str]:
    return {name: str(value) for name, value in dataclasses.asdict(recipe).items()}
