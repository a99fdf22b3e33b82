"""A layer-pruned drafter for SmolLM2-135M-Instruct: three of its layers, 8,192 output tokens.

    python -m experiments.train --config smollm2_pruned --data answers:PATH

Hardware: 2 CPU cores. First the target's hidden state at every token of the data is computed once
(1.2 kB each beside the run's folder, resumable): they give the teacher's distribution. Loss:
forward KL. Not trained to its end yet: no number to expect.
"""

from experiments.common import distill
from experiments.common.job import Arguments, Job
from models.prune import prune
from models.stages import with_teacher
from models.transformer import Transformer

LAYERS = 3
NAME = "smollm2_pruned"
ABOUT = "three layers of the target and a part of its head"
RECIPE = distill.Recipe(
    draft_vocab=8192,
    length=256,
    batch=4,
    steps=2000,
    warm_up=100,
    rate=7e-4,
    every=400,
    evaluated=48,
)


def build(asked: Arguments) -> Job:
    """See `experiments.train`."""
    recipe, of = RECIPE.changed(asked), distill.material(asked)
    layers = distill.evenly(of.target.model.config.num_layers, LAYERS)
    model, ids_U = distill.begin(
        of, recipe.draft_vocab, Transformer, lambda ids_U: prune(of.target.model, layers, ids_U)
    )
    return distill.job(
        of, model, ids_U, recipe, lambda _, params, batch: with_teacher(params, batch), NAME, ABOUT
    )
