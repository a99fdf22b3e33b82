"""The scripts: every one runs with --smoke, and bad flags get one clear error before any work."""

import subprocess

import pytest

from experiments import bench_drafter
from experiments import generate as job
from experiments.prompts.load import Prompt
from spec.drafters import NGramDrafter
from spec.draws import Children
from spec.generate import Request
from tests.common import processes, toys


def run(script: str, *flags: str) -> subprocess.CompletedProcess:
    return processes.python("-m", f"experiments.{script}", *flags)


@pytest.mark.slow
def test_generate(tmp_path):
    """On the real model; on a tiny one, see `test_training_scripts`."""
    done = run("generate", "--smoke", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "identical: yes" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {
        "generate.csv", "texts.jsonl", "trees.png"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "flags", "word"),
    [
        pytest.param("bench_decode", ("--only=plain",), "plain/minimal", marks=pytest.mark.slow),
        pytest.param(
            "bench_decode",
            ("--only=kinds", "--drafter=ngram", "--drafter=smollm2_feature", "--tree=2,1"),
            "ratio_geomean",
            marks=pytest.mark.slow,
        ),
        ("bench_verify", (), "traversal"),
        ("bench_kernels", (), "tpu, interpreted"),
        ("tune_kernels", (), "largest difference"),
        ("centauri_table", (), "all seconds are simulated"),
        ("calibrate", (), "loopback"),
    ],
)
def test_benchmarks(tmp_path, script, flags, word):
    done = run(script, "--smoke", f"--out={tmp_path}", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert word in done.stdout


def test_bad_flags():
    expected = {
        ("--seed=-1",): "--seed -1",
        ("--prompts=absent.jsonl",): "absent.jsonl cannot be read as prompts",
        ("--prompts=tests",): "tests cannot be read as prompts",
        ("--out=README.md",): "--out README.md cannot be a folder",
        ("--tree=2,1",): "--tree and --children describe model drafters",
        ("--budget=8",): "--budget 8 is shared by several drafters",
        ("--prompt=hi", "--split=dev"): "leave out --prompts and --split",
        ("--target=nowhere",): "Model 'nowhere'",
    }
    said = processes.refusals("generate", [("--smoke", *flags) for flags in expected])
    for error, words in zip(said, expected.values(), strict=True):
        assert error.startswith("Error: ")
        assert words in error


def test_the_shape_is_chosen_among_those_that_lose_on_no_kind():
    """Unless there are none; n-grams and chains are the best of all theirs."""

    def rows(*speeds):
        return [{"tokens_per_step": speed} for speed in speeds]

    def system(name, ngram):
        return bench_drafter.System(name, ngram, ngram, 4, (), Children.TOP_K)

    judged = {
        system("n-gram", 4): rows(2.0, 1.0, 1.5),
        system("n-gram", 8): rows(1.0, 1.8, 1.4),
        system("chain", 4): rows(9.0, 0.5, 3.0),
        system("merged tree", 4): rows(1.9, 5.0, 4.0),
        system("merged tree", 8): rows(2.0, 2.0, 2.0),
        system("merged tree", 12): rows(2.1, 1.0, 1.9),
    }
    best = [(s.name, s.ngram) for s in bench_drafter.chosen(judged)]
    assert best == [("n-gram", 4), ("chain", 4), ("merged tree", 8)]
    unsafe = {s: judged[s] for s in judged if (s.name, s.ngram) not in best[2:]} | {
        system("merged tree", 12): rows(1.0, 9.0, 3.0)
    }
    assert bench_drafter.chosen(unsafe)[-1].ngram == 4


def test_a_prompt_of_exactly_the_limit_gives_no_tokens():
    model = toys.chain11()
    limit = model.config.max_positions
    target = job.setup.Loaded(model, None)
    request = Request(8, vocab_size=11)
    prompt = Prompt("full", "chat", "eval", "")
    rows, answers, _ = job.run(target, NGramDrafter(), [prompt], [[2] * limit], [0], request, 1)
    assert (rows[0]["tokens"], rows[0]["identical"]) == (0, "yes")
    assert job.summary(rows, answers)["tokens"] == 0
