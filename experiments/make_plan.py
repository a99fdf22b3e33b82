"""Plans one training job: writes the file that `experiments.train --plan` reads.

    python -m experiments.make_plan --model llama-7b --cluster a100:4x8 --mesh host=4,fsdp=8

Nothing is trained: the planner simulates the job on a cluster known by name, or on one that
`experiments.calibrate` measured and wrote to a .json file. What training cannot carry out of its
choice (order, buckets, interleaved micro-batches) is not in the file, so the printed seconds, all
of them simulated, are the planner's and not those of the file. Seconds to a minute on a CPU.
"""

import pathlib
import sys

from absl import flags

from experiments.common import command, report, setup
from models.checkpoint import config_json, gguf
from models.config import ModelConfig
from models.presets import PRESETS
from parallel.launch import parse_mesh
from parallel.planner.cluster import Cluster, Placement
from parallel.planner.schedule import executable, plan
from parallel.planner.workload import Job, Model, Step

COLUMNS = ("step", "seconds", "blocking_over_it", "kind", "chosen")


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string(
        "model", "code_target", f"Name, .gguf file or folder; or of {', '.join(PRESETS)}."
    )
    flags.DEFINE_string("cluster", "a100:1x8", "NODESxGPUS, such as a100:4x8; or a .json file.")
    flags.DEFINE_string("mesh", "fsdp=8", "Devices along each axis, such as host=4,fsdp=8.")
    flags.DEFINE_list("shard", None, "Axes over which shards lie; fsdp, if the mesh has it.")
    flags.DEFINE_integer(
        "zero", 3, "Kept in shards: 1 state, 2 gradients too, 3 weights too.", 1, 3
    )
    flags.DEFINE_integer("tokens", 256, "Tokens of a sequence.", lower_bound=1)
    flags.DEFINE_integer("sequences", 8, "Sequences of the whole batch.", lower_bound=1)
    flags.DEFINE_integer("accumulate", 1, "Micro-batches of a step.", lower_bound=1)
    flags.DEFINE_enum("schedule", "1f1b", ["gpipe", "1f1b"], "Of a pipeline.")
    flags.DEFINE_bool("remat", False, "Compute blocks again in the backward pass.")
    flags.DEFINE_string("out", "out/plan.json", "JSON file to write.")
    flags.DEFINE_bool("smoke", False, "Two layers of the model.")


def sizes(name: str, layers: int | None = None) -> Model:
    """Returns what the planner has to know of a model.

    Args:
        name: a preset, or what `setup.find` takes.
        layers: instead of the model's.

    Raises:
        ValueError: if there is no such model, or its heads do not make up its width, which the
            planner takes for granted.
    """
    config = PRESETS[name] if name in PRESETS else _config(setup.find(name))
    if config.num_heads * config.head_dim != config.d_model:
        raise ValueError(
            f"--model {name}: {config.num_heads} heads of {config.head_dim} are not its width "
            f"{config.d_model}, which the planner counts on: choose another."
        )
    return Model(
        name,
        layers or config.num_layers,
        config.d_model,
        config.d_ff,
        config.num_heads,
        config.num_kv_heads,
        config.vocab_size,
        gated=True,
    )


def _config(path: pathlib.Path) -> ModelConfig:
    if path.is_file():
        return gguf.read_config(gguf.open_gguf(path), path)
    return config_json.read(path)


def step_of(args: flags.FlagValues) -> Step:
    """Returns the step that the flags describe.

    Raises:
        ValueError: naming what is unknown or does not divide.
    """
    mesh = parse_mesh(args.mesh)
    shard = tuple(axis for axis in mesh if axis == "fsdp")
    shard = shard if args.shard is None else tuple(args.shard)
    job = Job(
        sizes(args.model, 2 if args.smoke else None),
        args.tokens,
        args.sequences,
        args.accumulate,
        shard,
        args.zero if shard else 0,
        args.schedule,
        args.remat,
        clips=True,
    )
    return Step(job, Placement(Cluster.parse(args.cluster), mesh))


def main(args: flags.FlagValues) -> None:
    """Plans and writes."""
    try:
        out = pathlib.Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        step = step_of(args)
        best = plan(step)
        made = executable(best.choice, step)
        out.write_text(f"{made.to_json()}\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    blocking = best.baselines["blocking"].seconds
    every = {**best.baselines, best.name: best.result}
    rows = [
        {
            "step": name,
            "seconds": f"{1e3 * each.seconds:.3f} ms",
            "blocking_over_it": blocking / each.seconds,
            "kind": "simulated",
            "chosen": "yes" if name == best.name else "",
        }
        for name, each in every.items()
    ]
    print(report.table(rows, COLUMNS))
    asked = ["--mesh", args.mesh, "--plan", args.out]
    asked += ["--accumulate", f"{args.accumulate}"] * (args.accumulate > 1)
    asked += ["--remat"] * args.remat + ["--scan"] * made.prefetch
    print(f"wrote {out}; to run it: python -m experiments.train {' '.join(asked)} --config ...")


if __name__ == "__main__":
    command.run(main, define_flags)
