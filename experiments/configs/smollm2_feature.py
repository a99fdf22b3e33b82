"""A feature drafter for SmolLM2-135M-Instruct: one layer on the target's hidden states.

    python -m experiments.train --config smollm2_feature --data answers:PATH

Hardware: 2 CPU cores. First the target's hidden state at every token of the data is computed once
(1.2 kB each in the run's folder, resumable). The layer starts as the target's last one. Every batch
is read twice, with the target's features and with the drafter's own. Not trained to its end yet: no
number to expect.
"""

from flax import nnx

from experiments import distill
from experiments.configs.smollm2_pruned import RECIPE
from experiments.data.features import FeatureRows, hidden_states
from experiments.train import Arguments, Job
from models.feature import feature_model
from models.prune import prune
from models.stages import llama_stages, with_own_features

LAYERS = 1


def build(asked: Arguments) -> Job:
    """See `experiments.train`."""
    recipe, of = RECIPE.changed(asked), distill.material(asked)
    layers = distill.evenly(of.target.model.config.num_layers, LAYERS)
    model, ids_U = distill.begin(
        of,
        recipe.draft_vocab,
        lambda ids_U: feature_model(prune(of.target.model, layers, ids_U), nnx.Rngs(0)),
    )
    plain = of.rows(recipe.length, ids_U)
    hidden = hidden_states(plain, of.target.model, asked.out / "features.npy")
    rows = FeatureRows(plain, hidden)
    stages = llama_stages(model.config, freeze_embedding=True)
    return distill.job(
        of,
        model,
        ids_U,
        rows,
        recipe,
        lambda params, batch: with_own_features(stages, params, batch),
    )
