"""A feature drafter for SmolLM2-135M-Instruct: one layer on the target's hidden states.

    python -m experiments.train --config smollm2_feature --data answers:PATH

Hardware: 2 CPU cores. First the target's hidden state at every token of the data is computed once
(1.2 kB each beside the run's folder, resumable): they are the features, and give the teacher's
distribution. The layer starts as the target's last one. Every batch is read twice, with the
target's features and with the drafter's own. Loss: forward KL. On 3,280 answers (641 thousand
tokens) and one busy core: 46 minutes for the states, 3.5 s a step; at 400 and 800 steps KL 2.8 and
2.2, rank-1 success 0.14 and 0.19, rank-4 0.31 and 0.35 (`experiments/drafters`). Go on with
--init smollm2_feature's file and more data.
"""

from typing import Any

from flax import nnx

from experiments import distill
from experiments.configs.smollm2_pruned import RECIPE
from experiments.train import Arguments, Job
from models.feature import feature_model
from models.losses import Batch
from models.prune import prune
from models.stages import with_own_features, with_teacher
from parallel.stages import Stages

LAYERS = 1
ABOUT = {
    "about": "One decoder layer over the hidden states of SmolLM2-135M-Instruct (Q4_1, float32)",
    "command": "python -m experiments.train --config smollm2_feature",
}


def build(asked: Arguments) -> Job:
    """See `experiments.train`."""
    recipe, of = RECIPE.changed(asked), distill.material(asked)
    target = of.target.model
    layers = distill.evenly(target.config.num_layers, LAYERS)
    reads = quarters(target.config.num_layers)
    model, ids_U = distill.begin(
        of,
        recipe.draft_vocab,
        lambda ids_U: feature_model(prune(target, layers, ids_U), nnx.Rngs(0), reads),
    )
    target.taps = model.reads

    def read_twice(stages: Stages, params: Any, batch: Batch) -> Batch:
        return with_own_features(stages, params, with_teacher(params, batch))

    return distill.job(of, model, ids_U, recipe, read_twice, ABOUT)


def quarters(num_layers: int) -> tuple[int, ...]:
    """Returns the blocks that end the first three quarters of a model."""
    quarter = num_layers // 4
    ends = (quarter, num_layers // 2, num_layers - quarter)
    return tuple(sorted({max(end - 1, 0) for end in ends}))
