# Everything goes through .venv; each target works from an empty cache and is fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt Makefile setup.py src/splittime/kernels/native/csrc/* | cksum | cut -d' ' -f1)

.PHONY: setup serve check test format lint bench bench-peers clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "splittime needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) -V). Try: make PYTHON=python3.12 setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No venv module: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): about three minutes the first time. All that pip says: $(VENV)/setup.log"
	@$(BIN)/python install.py $(VENV)/setup.log --constraint constraints.txt --editable '.[dev,plots]'
	@rm -f $(VENV)/.setup-*
	@touch $@

serve: setup
	$(BIN)/splittime serve $(ARGS)

check: setup lint test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
	$(BIN)/python -m benchmarks.peers.http_load --folder $(PEERS) --precision int8 --clients 16 32
	$(BIN)/python -m benchmarks.micro.long_context --model $(PEERS)/models/llama-1b --quantization int8
	$(BIN)/python -m benchmarks.micro.host_overhead --model $(PEERS)/models/qwen3-0.6b --quantization int8
	$(BIN)/python -m benchmarks.peers.show --model llama-1b

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
