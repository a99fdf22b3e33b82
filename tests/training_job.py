"""A training run to be killed: `python -m tests.training_job FOLDER`."""

import pathlib
import sys

import jax
import numpy as np
import optax

from experiments.data.batches import Batches, Rows
from experiments.data.corpus import Corpus, Document
from experiments.loop import LoopConfig, fit
from models.stages import llama_stages, split
from parallel.train import TrainState, init_state, make_train_step
from tests import toys

STEPS = 8


def corpus(tokens: int = 4000) -> Corpus:
    """Documents of 3 to 40 tokens that follow a rule."""
    rng = np.random.default_rng(0)
    documents = []
    while sum(len(each.token_ids) for each in documents) < tokens:
        start = np.full(rng.integers(3, 40), rng.integers(toys.VOCAB2))
        documents.append(Document((start + 3 * np.arange(len(start))) % toys.VOCAB2))
    return Corpus.of(documents)


def train(folder: pathlib.Path, steps: int = STEPS, save_every: int = 2) -> TrainState:
    """Trains a toy for `steps`, or what is left of them."""
    model, optimizer = toys.tiny(), optax.adam(1e-2)
    step = make_train_step(llama_stages(model.config), optimizer, scan=True)
    batches = Batches(Rows(corpus(), 16, None), 4, seed=1)
    state = init_state(split(model), optimizer)
    return fit(step, state, batches, LoopConfig(steps, save_every, 0, keep=2), folder)


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    leaves = jax.tree.leaves(train(out))
    np.savez(out / "final.npz", *[np.asarray(leaf) for leaf in leaves])
