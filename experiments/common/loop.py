"""The one training loop: steps, progress, curves, evaluation, checkpoints, exact resumption."""

import csv
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from tqdm import tqdm

from parallel import launch
from parallel.train import Step, TrainState

# Steps between two looks at the device: the loss of every step is kept, but read in groups.
READ_EVERY = 10


class Batches(Protocol):
    """Batches by number; `experiments.data.batches.Batches` is one."""

    def __getitem__(self, step: int) -> Any:
        """Returns batch number `step`."""
        ...


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long, and how often what.

    Attributes:
        steps: optimiser steps in all, those before a resumption included.
        save_every: steps between checkpoints; the last step is always saved.
        evaluate_every: steps between evaluations, the last step also has one; 0 for never.
        keep: checkpoints kept, the newest.
    """

    steps: int
    save_every: int
    evaluate_every: int
    keep: int

    def __post_init__(self) -> None:
        """Refuses what would do nothing."""
        for name in ("steps", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1.")


def fit(
    step: Step,
    state: TrainState,
    batches: Batches,
    config: LoopConfig,
    folder: str | os.PathLike[str],
    evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
    prepare: Callable[[Any, Any], Any] | None = None,
    mesh: Mesh | None = None,
) -> TrainState:
    """Trains until `config.steps`, from the newest checkpoint in `folder` if there is one.

    What is interrupted at any moment (SIGKILL included) and started again with the same arguments
    ends with the same bits: checkpoints hold the whole state, become visible only when complete,
    and batches follow from the step's number.

    Args:
        step: from `make_train_step`.
        state: the state before the first step; its shapes are what a checkpoint must have.
        batches: see `Batches`.
        config: see `LoopConfig`.
        folder: for `checkpoints/`, `train.csv` (step, loss, grad_norm, tokens, tokens_per_s) and
            `evaluation.csv` (step and what `evaluate` returns).
        evaluate: figures of a state; not part of the training.
        prepare: `(params, batch) -> batch`, for batches that depend on the weights.
        mesh: of `step` and `state`. All processes read the same batches and save together; the
            first one writes the tables. A checkpoint can be restored on another mesh.

    Raises:
        ValueError: if the checkpoint there has other shapes.
        Exception: whatever made a save in the background fail, at the next save.
    """
    folder = pathlib.Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, create=True)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(
        folder / "checkpoints", item_handlers=handler, options=options
    ) as manager:
        state = _resume(manager, state)
        first = int(state.step)
        writes = jax.process_index() == 0
        curves = _Table(folder / "train.csv", first, writes)
        scores = _Table(folder / "evaluation.csv", first, writes)
        pending: list[tuple[int, Any]] = []
        clock = time.perf_counter()
        with tqdm(total=config.steps, initial=first, unit="step", disable=not writes) as bar:
            for number in range(first, config.steps):
                batch = launch.spread(batches[number], mesh)
                if prepare is not None:
                    batch = prepare(state.params, batch)
                state, metrics = step(state, batch)
                pending.append((number + 1, metrics))
                done = number + 1
                saves = done % config.save_every == 0 or done == config.steps
                due = done % max(config.evaluate_every, 1) == 0 or done == config.steps
                looks = bool(config.evaluate_every) and due
                if len(pending) == READ_EVERY or saves or looks:
                    seconds = _report(pending, curves, bar, clock)
                    clock, pending = clock + seconds, []
                if looks and evaluate is not None:
                    local = dataclasses.replace(state, params=launch.collected(state.params, mesh))
                    if writes:
                        scores.add({"step": done, **evaluate(local)})
                    clock = time.perf_counter()
                if saves:
                    # Copied to the host before the next step may overwrite it; written meanwhile.
                    manager.save(done, args=ocp.args.StandardSave(_arrays(state)))
        manager.wait_until_finished()
        manager.check_for_errors()
    return state


def _resume(manager: ocp.CheckpointManager, state: TrainState) -> TrainState:
    newest = manager.latest_step()
    if newest is None:
        return state
    wanted = _arrays(state)
    saved = manager.item_metadata(newest)
    found = jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), saved.tree)
    expected = jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), wanted)
    if found != expected:
        raise ValueError(
            f"The checkpoint of step {newest} in {manager.directory} belongs to another model or "
            "optimiser: choose another folder, or the configuration that it was made with."
        )
    restored = manager.restore(newest, args=ocp.args.StandardRestore(wanted))
    treedef = jax.tree.structure(state)
    return jax.tree.unflatten(treedef, [restored[name] for name in wanted])


def _arrays(state: TrainState) -> dict[str, jax.Array]:
    """Names the leaves by their number: a layout that no class of ours can change."""
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _report(pending: list[tuple[int, Any]], curves: "_Table", bar: tqdm, clock: float) -> float:
    """Waits for the device, writes a row for every step, and returns the seconds they took."""
    values = jax.device_get([metrics for _, metrics in pending])
    seconds = time.perf_counter() - clock
    tokens = float(sum(each.weight for each in values))
    for (number, _), each in zip(pending, values, strict=True):
        curves.add(
            {
                "step": number,
                "loss": float(each.loss),
                "grad_norm": float(each.grad_norm),
                "tokens": float(each.weight),
                "tokens_per_s": tokens / seconds,
            }
        )
    bar.update(len(pending))
    bar.set_postfix(
        loss=f"{np.mean([each.loss for each in values]):.3f}", tokens_s=f"{tokens / seconds:.0f}"
    )
    return seconds


def columns(path: pathlib.Path) -> dict[str, list[float]]:
    """Returns a table that `fit` wrote, by column; empty if there is none."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]} if rows else {}


class _Table:
    """A CSV file that grows; on resumption the rows after the checkpoint are dropped."""

    def __init__(self, path: pathlib.Path, first: int, writes: bool):
        self.path, self.writes = path, writes
        if not writes or not path.exists():
            return
        with path.open(encoding="utf-8", newline="") as file:
            # A row that was cut off by the end of its process lacks fields.
            whole = [row for row in csv.DictReader(file) if None not in row.values()]
        rows = [row for row in whole if int(row["step"]) <= first]
        path.unlink()
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)
