"""A training run to be killed: FOLDER [MESH [COORDINATOR PROCESSES NUMBER STEPS [SHARD]]]."""

import pathlib
import sys

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.common.loop import LoopConfig, fit
from experiments.data.batches import Batches, Rows
from experiments.data.corpus import Corpus, Document
from models.stages import llama_stages, split
from parallel import launch
from parallel.plan import Plan
from parallel.train import TrainState, init_state, make_train_step
from tests.common import toys

STEPS = 8


def corpus(tokens: int = 4000) -> Corpus:
    """Documents of 3 to 40 tokens that follow a rule."""
    rng = np.random.default_rng(0)
    documents = []
    while sum(len(each.token_ids) for each in documents) < tokens:
        start = np.full(rng.integers(3, 40), rng.integers(96))
        documents.append(Document((start + 3 * np.arange(len(start))) % 96))
    return Corpus.of(documents)


def train(
    folder: pathlib.Path,
    steps: int = STEPS,
    save_every: int = 2,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
) -> TrainState:
    """Trains a toy for `steps`, or what is left of them."""
    model, optimizer = toys.tiny(vocab_size=96), optax.adam(1e-2)
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, scan=True)
    batches = Batches(Rows(corpus(), 16, None), 4, seed=1)
    state = init_state(split(model), optimizer, mesh, plan)
    config = LoopConfig(steps, save_every, 0, keep=2)
    return fit(step, state, batches, config, folder, mesh=mesh)


if __name__ == "__main__":
    out, *how = sys.argv[1:]
    if how[1:]:
        launch.start(how[1], int(how[2]), int(how[3]))
    mesh = launch.make_mesh(launch.parse_mesh(how[0])) if how else None
    if mesh is not None:
        launch.check_collectives(mesh)
    steps = int(how[4]) if how[1:] else STEPS
    plan = Plan(shard=tuple(how[5].split(","))) if how[5:] else None
    with launch.together():
        last = launch.collected(train(pathlib.Path(out), steps, mesh=mesh, plan=plan), mesh)
    if not jax.process_index():
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(last)]
        np.savez(pathlib.Path(out) / "final.npz", *leaves)
