# One definition of every check and command. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.nereid-setup
MANIFESTS := pyproject.toml constraints.txt parsers/pyproject.toml backend/pyproject.toml client/pyproject.toml

MODEL ?=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
ARGS ?=
MINUTES ?= 10

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-parsers check docs prose lint format type deps demo-train demo-eval archs bench bench-peers bench-attention bench-serve bench-engine bench-parsers bench-pooling bench-constraints bench-sampler bench-scheduler bench-growth bench-gpu loadtest soak cancel-storm flat-memory clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make serve MODEL=/path/to/checkpoint HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002 OPENAI_PORT=9000 ARGS='--max-model-len 4096'"

setup: $(STAMP) ## Make .venv with everything for serving and testing (quick when it is already there)

$(STAMP): $(MANIFESTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v <= (3, 12); ok or print("setup: $(PYTHON) is Python %d.%d; Nereid needs 3.11 or 3.12: make setup PYTHON=python3.11" % v, file=sys.stderr); sys.exit(0 if ok else 2)'
	@echo "setup: making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "setup: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@echo "setup: installing torch, transformers and the three packages (about a minute with a warm pip cache)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e parsers -e backend -e client --group dev --group embedded-server
	@echo "setup: installing the embedded tritonserver"
	@$(BIN)/nereid install-server
	@touch $@
	@echo "setup: done"

serve: setup ## Serve a chat model: tritonserver and the OpenAI frontend (MODEL=/path for your own)
	@exec $(BIN)/nereid serve $(if $(MODEL),--model $(MODEL)) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) --openai-port $(OPENAI_PORT) $(ARGS)

test: setup ## Every test that a machine without a GPU can run, the real tritonserver included
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-parsers: ## parsers/ alone in an empty environment: it must not need the other rooms
	@rm -rf $(VENV)-parsers && $(PYTHON) -m venv $(VENV)-parsers
	@$(VENV)-parsers/bin/python -m pip install --quiet ./parsers pytest pytest-timeout hypothesis
	@$(VENV)-parsers/bin/python -m pytest -q tests/parsers
	@rm -rf $(VENV)-parsers

check: lint type deps docs test ## Run everything that CI checks: lint, types, import rules, documentation, tests

docs: setup ## Build the documentation site into site/; fail if a link is broken
	@$(BIN)/python docs_tools/build_site.py

prose: setup ## Find private words in the documentation, docstrings and messages (codespell)
	@$(BIN)/python docs_tools/check_prose.py

lint: setup ## Style and common mistakes (ruff, hadolint)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/hadolint Dockerfile

format: setup ## Format the code (ruff)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

type: setup ## Types (mypy, strict)
	@$(BIN)/mypy parsers/nereid_parsers backend/nereid_backend client/nereid_client

deps: setup ## Import rules between the rooms (import-linter)
	@$(BIN)/lint-imports

demo-train: setup ## Train the demo models again from their seeds (under an hour on two cores)
	@$(BIN)/python demo/train.py $(ARGS)
	@$(BIN)/python demo/train_pooling.py

demo-eval: setup ## The demo models on held-out prompts: accuracy per skill, nDCG@10
	@$(BIN)/python demo/evaluate.py $(ARGS)

archs: setup ## Every causal-LM architecture of transformers on tiny random weights: exact, refused, or wrong
	@$(BIN)/python tests/backend/archs.py $(ARGS)

bench: setup ## The engine against transformers and llama.cpp, with this machine's limits, in one table
	@$(BIN)/python loadtest/bench.py $(ARGS)

bench-peers: ## Install llama.cpp (built from source, about ten minutes) for `make bench` in its own environment
	@test -x $(VENV)-peers/bin/python || $(PYTHON) -m venv $(VENV)-peers
	@$(VENV)-peers/bin/python -m pip install --quiet llama-cpp-python==0.3.36 gguf==0.19.0 numpy

bench-attention: setup ## Decode attention: the native CPU kernel against the torch reference and the memory's speed
	@$(BIN)/python loadtest/bench_attention.py $(ARGS)

bench-serve: setup ## Tokens/s through the Triton server and the frontend against the same engine in process
	@$(BIN)/python loadtest/bench_serve.py $(ARGS)

bench-engine: setup ## The engine alone against transformers' generate
	@$(BIN)/python loadtest/bench_engine.py $(ARGS)

bench-parsers: setup ## Microseconds per character that parsing costs, by kind of body
	@$(BIN)/python loadtest/bench_parsers.py $(ARGS)

bench-pooling: setup ## Embedders and rerankers against sentence-transformers, with the machine's limit
	@$(BIN)/python loadtest/bench_pooling.py $(ARGS)

bench-constraints: setup ## Grammars: compiling, masks, first token, and tokens/s with a schema against without
	@$(BIN)/python loadtest/bench_constraints.py $(ARGS)

bench-sampler: setup ## Sampling: microseconds a step by what requests ask for
	@$(BIN)/python loadtest/bench_sampler.py $(ARGS)

bench-scheduler: setup ## Scheduling: milliseconds a step with many running and waiting requests
	@$(BIN)/python loadtest/bench_scheduler.py $(ARGS)

bench-growth: setup ## Charts of how a step grows with batch, context, waiting requests and output
	@$(BIN)/python loadtest/growth.py $(ARGS)

bench-gpu: ## On a machine with an NVIDIA GPU: checks every kernel against its twin, then measures (no network; needs torch with CUDA)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) loadtest/bench_gpu.py $(ARGS)

loadtest: setup ## Two minutes of mixed load on servers of its own, every answer checked: make loadtest ARGS='--seconds 20'
	@$(BIN)/python loadtest/load.py $(ARGS)

soak: setup ## Mixed traffic with a fault a minute, invariants checked all along: make soak MINUTES=30
	@$(BIN)/python loadtest/soak.py --minutes $(MINUTES) $(ARGS)

cancel-storm: setup ## Twenty thousand requests, half of them given up at random, through every door
	@$(BIN)/python loadtest/cancel_storm.py $(ARGS)

flat-memory: setup ## Traffic at saturation: does any process keep growing? make flat-memory MINUTES=10
	@$(BIN)/python loadtest/soak.py --faults none --minutes $(MINUTES) --users 16 $(ARGS)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
