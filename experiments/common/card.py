"""What a trained file says of itself: what it is, how it was made, what it reached."""

import pathlib
import platform
from collections.abc import Sequence

from experiments.common import setup
from experiments.common.job import Arguments
from experiments.common.loop import columns


def told(asked: Arguments, config: str, words: str, data: Sequence[str]) -> dict[str, str]:
    """Returns what was asked for; of a path the last part, so that no machine is described.

    Args:
        asked: the command line.
        config: file of experiments/configs.
        words: what was trained.
        data: its sources, see `data.sources.load`.
    """
    named = (source.partition(":") for source in data)
    short = [f"{kind}:{pathlib.Path(where).name}" for kind, _, where in named]
    flags = [f"--config {config}"]
    if asked.target != setup.DEFAULT_TARGET:
        flags.append(f"--target {setup.title(asked.target)}")
    flags += [f"--data {source}" for source in short]
    if asked.init is not None:
        flags.append(f"--init {pathlib.Path(asked.init).name}")
    if asked.steps is not None:
        flags.append(f"--steps {asked.steps}")
    command = " ".join(["python -m experiments.train", *flags])
    if any(source.endswith(":stdlib") for source in short):
        short.append(f"Python {platform.python_version()}")
    return {"about": words, "command": command, "data": ", ".join(short)}


def reached(folder: pathlib.Path, prefix: str = "") -> dict[str, str]:
    """Returns what a run's tables say in the end: minutes, loss, figures of the last evaluation.

    Args:
        folder: of the run, see `loop.fit`.
        prefix: of the names of these figures: what they were measured on.
    """
    curves, scores = (columns(folder / name) for name in ("train.csv", "evaluation.csv"))
    spent = zip(curves["tokens"], curves["tokens_per_s"], strict=True)
    minutes = sum(tokens / rate for tokens, rate in spent if rate) / 60
    last = curves["loss"][-50:]
    out = {
        "steps": f"{curves['step'][-1]:.0f}",
        "minutes": f"{minutes:.0f}",
        "loss": f"{sum(last) / len(last):.3f}",
    }
    return out | {f"{prefix}{name}": f"{scores[name][-1]:.3f}" for name in scores if name != "step"}
