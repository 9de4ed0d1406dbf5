# `make demo` and `make test` are all that a fresh clone needs. Both work in one .venv, made once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# A Python to use, if not the first one that serves: make test PYTHON=/path/to/python3.12
PYTHON ?=
# More options for pip, such as another index: make test PIP_FLAGS="--index-url ..."
PIP_FLAGS ?=
# More options for pytest: make test PYTEST_FLAGS="-k store -x"
PYTEST_FLAGS ?=
# Processes that run the tests side by side: make test WORKERS=0 for one after another
WORKERS ?= logical
# Part of the run on a GPU, such as: make gpu GPU_FLAGS="--parts kernels tune"
GPU_FLAGS ?=
# Part of the faults, such as one store: make faults FAULTS_FLAGS="--store zarr"
FAULTS_FLAGS ?=

PYTEST = --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal $(PYTEST_FLAGS)

# Processors sum in different orders, and what is chosen by the processor differs too: types, kernels. So these switches
# of PyTorch, oneDNN, MKL and our own C make the run of a processor with AVX2 and nothing wider: there is no bfloat16.
NARROW := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MEMSTORE_NATIVE=0

BIN := .venv/bin
READY := .venv/.ready
LOWEST := .venv/lowest

.PHONY: help demo test test-slow test-narrow test-lowest lint types format pytest bench papers faults gpu coverage house prose docs site pictures screenshots wheel-smoke clean

help: ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: $(READY) ## Let a small model read a million tokens into a memory and answer from it (half a minute)
	$(BIN)/memstore demo

test: lint $(READY) ## Lint; check types and run the tests side by side
	$(MAKE) --jobs 2 types pytest

test-slow: $(READY) ## Run the tests that `make test` leaves out (trainings, demos, compilation for GPUs, a browser)
	$(BIN)/python -m pytest -m slow $(PYTEST)

test-narrow: $(READY) ## Run the tests of `make test` as on a processor with AVX2 and no wider vectors, without compiled C
	$(NARROW) $(BIN)/python -m pytest -m "not slow" $(PYTEST)

test-lowest: $(READY) ## Run tests of readers and models with the lowest transformers that is supported, which pip fetches
	test -x $(LOWEST)/bin/python || $(BIN)/python -m venv $(LOWEST)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(echo $(LOWEST)/lib/*/site-packages)/behind.pth"
	$(LOWEST)/bin/python -m pip install -q transformers==5.4.0
	PYTHONPATH=$(CURDIR) $(LOWEST)/bin/python -m pytest tests/readers/test_asking.py tests/readers/test_caches.py tests/readers/test_contract.py \
	    tests/readers/test_conversation.py tests/models/test_drt_transformers.py tests/models/test_landmark_transformers.py \
	    -m "not slow" -k "not Hybrid and not checkpointing" $(PYTEST)

lint: $(READY) ## Check format and style, of code and of prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.prose --check

types: $(READY) ## Check types
	$(BIN)/mypy

pytest: $(READY) ## Run the tests alone
	$(BIN)/python -m pytest -m "not slow" $(PYTEST)

format: $(READY) ## Put the code into the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# What needs a model, a text or a memory of yours, or a GPU, is run by hand.
BY_HAND := answers carriers chain factories gpu hils_table kept keysets knn_tables known landmark_finetune \
    landmark_passkeys landmark_tables lookups memorizing_stock memory_questions parallel pays position_jumps \
    price prose query rows searches staleness tracing_models training_speeds two_hops
bench: $(READY) ## Measure what needs no model or text of your own, some minutes each
	for name in $(filter-out $(BY_HAND),$(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))); do $(BIN)/python -m benchmarks.$$name; done

papers: $(READY) ## Print the tables of the papers from their rows; each module says how to make them anew
	@for table in hils_table "hils_table --output benchmarks/results/hils-table-long.json" two_hops position_jumps landmark_passkeys staleness training_speeds offloading; do \
	    printf '\n## python -m benchmarks.%s --print\n\n' "$$table"; $(BIN)/python -m benchmarks.$$table --print || exit; done
	@printf '\n## python -m benchmarks.rows FILE...\n\n'; $(BIN)/python -m benchmarks.rows $(patsubst %,benchmarks/results/%.json, \
	    landmark-perplexity landmark-context-miss memorizing-perplexity memorizing-smollm2 questions-ruler)

faults: $(READY) ## Kill, fill, flip, truncate: the long form of the fault harness (an hour and a quarter)
	$(BIN)/python -m tests.faults.run --long --save benchmarks/results/faults.json $(FAULTS_FLAGS)

gpu: ## On a GPU: try everything there and measure it, in nine minutes, with the Python that is there (no network needed)
	$(or $(PYTHON),python3) benchmarks/gpu.py $(GPU_FLAGS)

coverage: $(READY) ## Say which part of the branches of each package `make test` runs (it takes twice as long)
	mkdir -p build && rm -f build/coverage.json
	$(BIN)/python -m pytest -m "not slow" $(PYTEST) --cov --cov-report= --cov-report=json:build/coverage.json || test -s build/coverage.json
	$(BIN)/python -m tests.branches build/coverage.json

house: $(READY) ## Say how large and how tangled the package is, and how many files common calls pass
	$(BIN)/python -m tests.house --check

prose: $(READY) ## Say how easily README and docs read, page by page
	$(BIN)/python -m tests.prose

docs: $(READY) ## Write docs/cli.md and docs/api.md anew
	$(BIN)/python -m tests.tools.reference

site: $(READY) ## Build the site of the documentation in build/site; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html -c docs/site . build/site

PICTURES := build/pictures
pictures: $(READY) ## Draw docs/pictures anew, from the demo's memory and (the audit) the README read by a stock model
	rm -rf $(PICTURES) && mkdir -p $(PICTURES) docs/pictures
	$(BIN)/memstore demo --keep $(PICTURES)/demo.mem
	for kind in heat tiers margins similarity; do \
	    $(BIN)/memstore plot $$kind $(PICTURES)/demo.mem --out docs/pictures/$$kind.png \
	        $$(if [ $$kind = similarity ]; then echo --document volume-1; fi); \
	done
	$(BIN)/memstore read README.md $(PICTURES)/readme.mem
	$(BIN)/memstore plot audit $(PICTURES)/readme.mem --question "The index that is the default is" --out docs/pictures/audit.png

screenshots: $(READY) ## Write the pictures of the inspector page in docs/pictures anew (a minute)
	$(BIN)/python -m tests.tools.inspector.screenshots

wheel-smoke: $(READY) ## Build the wheel and try it with its declared dependencies alone
	$(BIN)/python tests/tools/wheel_smoke.py

clean: ## Remove everything that was made, .venv too
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	    python="$$(bash tests/tools/find_python.sh $(PYTHON))"; \
	    echo "making .venv with $$python"; \
	    "$$python" -m venv .venv; \
	fi
	@echo "installing the development set (PyTorch is the large part: some minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@
