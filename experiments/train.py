"""Trains what a config describes: resumable, with curves, ending in a file that can be used.

    python -m experiments.train --config smollm2_pruned [--out out/train/smollm2_pruned]

Cost and the figures to expect stand at the head of each file in experiments/configs. Interrupt it
at any moment; the same command goes on where the newest checkpoint stands. On several devices, and
on several processes, which all run the same command but for their number:

    python -m experiments.train --config code_target --mesh data=2
        --coordinator HOST:9911 --num_processes 2 --process_id 0
"""

import dataclasses
import importlib
import pathlib
import pkgutil
import sys
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh

from experiments import configs
from experiments.common import command, setup
from experiments.common.job import Arguments, Job
from experiments.common.loop import columns, fit
from experiments.common.plots import plot_curves
from parallel import launch
from parallel.plan import Plan
from parallel.train import init_state, make_train_step


def config_names() -> list[str]:
    """Lists the files of experiments/configs."""
    return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_enum("config", None, config_names(), "File of experiments/configs.", required=True)
    flags.DEFINE_string("target", setup.DEFAULT_TARGET, "Model: name, .gguf file or folder.")
    flags.DEFINE_multi_string(
        "data", [], "Data instead of the config's: text:SOURCE or answers:PATH. Repeat to mix."
    )
    flags.DEFINE_string("init", None, "Weights to start from: a file that a run exported.")
    flags.DEFINE_integer("steps", None, "Steps instead of the config's.", lower_bound=1)
    flags.DEFINE_string("out", None, "Folder; out/train/<config> by default.")
    flags.DEFINE_bool("smoke", False, "A few steps on little data.")
    flags.DEFINE_string("mesh", None, "Devices along each axis, such as data=2,fsdp=4.")
    flags.DEFINE_string("plan", None, "JSON file of a communication plan, see parallel/plan.py.")
    flags.DEFINE_string("coordinator", None, "host:port of process 0, if there are several.")
    flags.DEFINE_integer("num_processes", None, "Processes in all.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Number of this process.", lower_bound=0)
    flags.DEFINE_bool("detect", False, "Find coordinator and numbers in the cluster's environment.")
    flags.DEFINE_integer("accumulate", None, "Micro-batches of a step.", lower_bound=1)
    flags.DEFINE_bool("remat", False, "Compute blocks again in the backward pass.")
    flags.DEFINE_bool("scan", False, "One compiled block in a loop.")
    flags.DEFINE_enum("dtype", None, ["bfloat16", "float16"], "Compute in this, not in float32.")


def train(
    job: Job, out: pathlib.Path, mesh: Mesh | None = None, plan: Plan | None = None, **how: Any
) -> pathlib.Path | None:
    """Runs a job to its end and draws its curves.

    Args:
        job: what to train.
        out: folder of the run, the same for all processes.
        mesh: see `make_train_step`.
        plan: see `make_train_step`.
        **how: further arguments of `make_train_step`.

    Returns:
        What was exported; None in all processes but the first.
    """
    step = make_train_step(job.stages, job.optimizer, mesh, plan, **how)
    with launch.together():
        state = init_state(job.params, job.optimizer, mesh, plan)
        state = fit(step, state, job.batches, job.loop, out, job.evaluate, job.prepare, mesh)
        state = dataclasses.replace(state, params=launch.collected(state.params, mesh))
    if jax.process_index():
        return None
    plot_curves(out / "curves.png", columns(out / "train.csv"), columns(out / "evaluation.csv"))
    return job.export(state, out)


def main(args: flags.FlagValues) -> None:
    """Runs the job."""
    out = pathlib.Path(args.out or f"out/train/{args.config}")
    try:
        launch.start(args.coordinator, args.num_processes, args.process_id, args.detect)
        mesh = None if args.mesh is None else launch.make_mesh(launch.parse_mesh(args.mesh))
        plan = None if args.plan is None else Plan.from_json(_text(args.plan))
        if mesh is not None:
            launch.check_collectives(mesh, (plan or Plan()).sharded(dict(mesh.shape)))
        elif jax.process_count() > 1:
            raise ValueError(f"{jax.process_count()} processes need a --mesh, such as data=2.")
        module = importlib.import_module(f"experiments.configs.{args.config}")
        asked = Arguments(args.target, tuple(args.data), args.init, args.steps, args.smoke, out)
        with launch.first_process_first():  # it makes tokenizers and features, the others read
            job = module.build(asked)
        exported = train(
            job,
            out,
            mesh,
            plan,
            accumulate=args.accumulate or job.accumulate,
            remat=args.remat,
            scan=args.scan,
            compute_dtype=args.dtype,
        )
        if exported is not None:
            print(f"wrote {exported}, {out}/train.csv, curves.png")
    except (ValueError, RuntimeError) as error:
        sys.exit(f"Error: {error}")


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--plan {path} cannot be read ({error}): give a JSON file.") from error


if __name__ == "__main__":
    command.run(main, define_flags)
