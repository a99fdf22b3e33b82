"""What the command line says to a config, and what a config says back: a job of training."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import optax

from experiments.common.loop import Batches, LoopConfig
from parallel.stages import Params, Stages
from parallel.train import TrainState


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the command line says to a config.

    Attributes:
        target: model that the drafter is for, see `setup.load`.
        data: sources, see `data.sources.load`; empty for the config's own.
        init: a file that an earlier run exported, to go on from, or None.
        steps: optimiser steps, or None for the config's.
        smoke: a few short steps.
        out: folder of the run.
    """

    target: str
    data: tuple[str, ...]
    init: str | None
    steps: int | None
    smoke: bool
    out: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Job:
    """What a config's `build(arguments)` returns.

    Attributes:
        stages: the model.
        params: its weights before the first step.
        optimizer: with its schedule.
        batches: by number.
        loop: how long, how often what.
        accumulate: micro-batches of a step.
        evaluate: figures of a state, such as tokens per step on `dev` prompts; or None.
        prepare: changes a batch by the weights, see `loop.fit`; or None.
        export: writes what the run is for, given the last state and a folder; returns where.
    """

    stages: Stages
    params: Params
    optimizer: optax.GradientTransformation
    batches: Batches
    loop: LoopConfig
    accumulate: int
    evaluate: Callable[[TrainState], Mapping[str, float]] | None
    prepare: Callable[[Any, Any], Any] | None
    export: Callable[[TrainState, pathlib.Path], pathlib.Path]
