"""Data, training and drafting by the scripts, on a tiny target in a folder: one after the other."""

import csv
import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from safetensors import safe_open

from experiments import make_answers
from experiments.common import drafting, setup
from models.checkpoint import safetensors
from parallel.plan import Plan
from spec.drafters import NGramDrafter
from tests.common import processes, toys
from tests.models.test_tokenizer import CHATML, byte_level, write_folder


def run(script, *flags, **environment):
    done = processes.python("-m", f"experiments.{script}", *flags, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    backend = byte_level()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    target = toys.tiny(vocab_size=258, max_positions=1024, tied_embeddings=True)
    safetensors.save(target, folder)
    return write_folder(folder, backend, tokenizer_config=settings)


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    """Two answers, made in two goes."""
    folder = tmp_path_factory.mktemp("answers") / "shards"
    flags = (f"--target={target}", f"--out={folder}", "--smoke", "--batch=1")
    run("make_answers", *flags)
    shards = sorted(folder.glob("answers-*.jsonl"))
    first = shards[0].read_text()
    shards[1].unlink()
    run("make_answers", *flags)
    assert shards[0].read_text() == first
    assert len(json.loads(shards[1].read_text())["answer_ids"]) == 8
    return folder


def test_answers_of_another_job_are_not_continued(tmp_path):
    asked = {"target": "t", "batch": 2, "temperature": 0.0, "seed": 0}
    job = tmp_path / "job.json"
    make_answers.check_same_job(SimpleNamespace(**asked), [], 8, job)
    make_answers.check_same_job(SimpleNamespace(**asked), [], 8, job)
    with pytest.raises(ValueError, match="answers of another job"):
        make_answers.check_same_job(SimpleNamespace(**asked | {"temperature": 1.0}), [], 8, job)


@pytest.mark.parametrize(
    "config", [pytest.param("smollm2_pruned", marks=pytest.mark.slow), "smollm2_feature"]
)
def test_a_drafter_is_trained_and_drafts(target, answers, tmp_path, config):
    """One of the two is trained on, the other drafts in the main job and is compared."""
    data = f"--data=text:{processes.ROOT / 'spec'}", f"--data=answers:{answers}"
    out = run(
        "train", f"--config={config}", f"--target={target}", "--smoke", f"--out={tmp_path}", *data
    )
    assert "drafter.safetensors" in out
    with (tmp_path / "train.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4]
    with (tmp_path / "evaluation.csv").open(newline="") as file:
        assert float(next(csv.DictReader(file))["tokens_per_step"]) >= 1
    assert (tmp_path / "curves.png").stat().st_size > 1000
    file = tmp_path / "drafter.safetensors"
    if config == "smollm2_pruned":
        again = run(
            "train",
            f"--config={config}",
            f"--target={target}",
            "--smoke",
            f"--out={tmp_path / 'more'}",
            f"--init={file}",
            *data,
        )
        assert "drafter.safetensors" in again
        return
    with safe_open(file, framework="np") as weights:  # table and head are the target's own
        assert not {"embed_VD", "head_DU"} & set(weights.keys())
        card = weights.metadata()
    assert card["steps"] == "4"
    assert config in card["command"]
    assert {"about", "data", "minutes", "loss", "dev_rank_1", "dev_tokens_per_step"} <= set(card)
    done = run(
        "generate",
        f"--target={target}",
        "--smoke",
        "--drafter=ngram",
        f"--drafter={file}",
        "--tree=2,1",
        f"--out={tmp_path / 'texts'}",
    )
    assert "identical: yes" in done
    written = {path.name for path in (tmp_path / "texts").iterdir()}
    assert written == {"generate.csv", "texts.jsonl", "trees.png"}
    table = run(
        "bench_drafter",
        f"--target={target}",
        "--smoke",
        f"--drafter={file}",
        "--nodes=8",
        "--temperature=1",
        f"--out={tmp_path}",
    )
    for system in ("n-gram", "merged tree", "chain"):
        assert system in table


def test_the_code_pair(tmp_path):
    """A tokenizer, a target (on two devices, by a plan), a drafter that it teaches, a text."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"bucket": "block", "gather": "ring_gather(fsdp)"}')
    flags = ("--config=code_target", "--smoke", f"--out={tmp_path / 'target'}")
    two = processes.one_device()["XLA_FLAGS"].replace("device_count=1", "device_count=2")
    run("train", *flags, "--mesh=fsdp=2", f"--plan={plan}", XLA_FLAGS=two)
    model = tmp_path / "target" / "model"
    flags = ("--config=code_drafter", "--smoke", f"--target={model}")
    run("train", *flags, f"--out={tmp_path / 'drafter'}")
    loaded = setup.load(str(model), jnp.float32)
    files = [str(tmp_path / "drafter" / "model")]
    drafter = drafting.make(files, ["2,1"], "top_k", NGramDrafter(), loaded, jnp.float32)
    for folder, figure in ((model, "held_out_loss"), (tmp_path / "drafter" / "model", "loss")):
        assert (folder / "generation_config.json").is_file()
        with safe_open(folder / "model.safetensors", framework="np") as file:
            assert {"about", "command", "data", "minutes", figure} <= set(file.metadata())
    plain = toys.decode(loaded.model, toys.PLAIN, [[5, 9]], 8)
    assert toys.decode(loaded.model, drafter, [[5, 9]], 8) == plain


def test_a_plan_is_made_for_a_mesh_and_trained_by(tmp_path):
    plan, mesh = tmp_path / "plan.json", "--mesh=fsdp=2"
    said = run("make_plan", "--smoke", "--cluster=a100:1x2", mesh, f"--out={plan}")
    assert "simulated" in said
    asked = said.split("experiments.train ")[1].removesuffix(" --config ...\n").split()
    made = Plan.from_json(plan.read_text())
    assert made != Plan()
    made.check({"fsdp": 2}, scan="--scan" in asked)
    with pytest.raises(ValueError, match="needs a mesh with the axis fsdp"):
        made.check({"data": 2}, scan=True)
    two = processes.one_device()["XLA_FLAGS"].replace("device_count=1", "device_count=2")
    flags = ("--config=code_target", "--smoke", f"--out={tmp_path / 'target'}")
    assert "wrote" in run("train", *flags, *asked, XLA_FLAGS=two)


def test_bad_plans(tmp_path):
    command = ("--smoke", f"--out={tmp_path / 'plan.json'}")
    expected = {
        ("--mesh=fsdp=4",): "has 4 devices, a100:1x8 has 8",
        ("--mesh=data=8", "--shard=fsdp"): "with shards over ('fsdp',)",
        ("--model=nowhere",): "Model 'nowhere'",
        ("--cluster=abacus:1x8",): "chip 'abacus' is unknown",
        ("--shard=",): "zero = 0 on",
    }
    said = processes.refusals("make_plan", [(*command, *flags) for flags in expected])
    for error, words in zip(said, expected.values(), strict=True):
        assert error.startswith("Error: ")
        assert words in error


def test_bad_flags(target, tmp_path):
    command = ("--config=smollm2_pruned", f"--target={target}", "--smoke", f"--out={tmp_path}")
    expected = {
        ("--data=music:bach",): "write text:SOURCE or answers:PATH",
        ("--init=nowhere.safetensors",): "nowhere.safetensors cannot be read",
        ("--mesh=data=3",): "has 3 devices, there are 1",
        ("--mesh=rows",): "write data=2,fsdp=4",
        ("--num_processes=2",): "give all three",
    }
    said = processes.refusals("train", [(*command, *flags) for flags in expected])
    for error, words in zip(said, expected.values(), strict=True):
        assert error.startswith("Error: ")
        assert words in error
