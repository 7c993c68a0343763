# Every verb works from a clean clone with nothing but make and a Python >= 3.11.
# `make demo` installs the product alone; the verbs for work on it install the tools too.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
NODE := clients/node/node_modules/.installed
# The machine's own python3 is tried first; PYTHON=/path/to/python overrides.
PYTHON ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many small processes at once: one thread each, or they fight for the cores. Services that are started
# otherwise, `make demo` too, choose for themselves.
test coverage test-long test-faults golden: export OMP_NUM_THREADS ?= 1
PYTEST_ARGS ?=
# Both suites run on all cores. Tests of a file share what they start, so they stay in one process. In their own
# order: files of processes come first, and many small ones are left to fill the cores at the end.
WORKERS := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help venv demo test coverage test-long test-faults golden test-gpu fmt lint types protos bench sanitize clean

help: ## show the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# `--group` needs pip 25.1, so pip itself comes first.
$(BIN)/python:
	@set -eu; \
	for candidate in $(PYTHON) python3 python3.11 python3.12 python3.13 python; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	      >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "make: no Python >= 3.11 with the venv module on PATH; install one (Debian: apt-get install" \
	    "python3 python3-venv) or name it: make venv PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$found --version)"; \
	"$$found" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

# Where the index has no CPU build of that torch, pip finds no set that fits: then torch brings its own triton.
define install
	@$(BIN)/python -m pip install --quiet -c constraints-cpu.txt $(1) 2> $(VENV)/install.log || { \
	  grep -q ResolutionImpossible $(VENV)/install.log || { cat $(VENV)/install.log >&2; exit 1; }; \
	  echo "the package index has no CPU build of torch: installing its CUDA build, several GB;" \
	    "for the small one set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels" >&2; \
	  grep -v '^triton' constraints-cpu.txt > $(VENV)/constraints.txt; \
	  $(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt $(1); }
endef

$(RUNTIME): pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(call install,-e .)
	@touch $@

$(DEV): pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(call install,-e . --group dev)
	@touch $@ $(RUNTIME)

# Node is optional: its test is skipped, with the reason, where npm is missing.
$(NODE): clients/node/package.json clients/node/package-lock.json
	@if command -v npm >/dev/null 2>&1; then \
	  npm ci --prefix clients/node --no-audit --no-fund --loglevel=error && touch $@; \
	else echo "npm not found: the Node client's test will be skipped"; fi

venv: $(DEV) ## create .venv with the product and the tools

demo: $(RUNTIME) ## start a local stack, upload three adapters, stream one prompt through each
	$(BIN)/python examples/demo.py

test: $(DEV) $(NODE) ## unit and integration tests
	$(BIN)/python -m pytest -m "not long and not gpu" $(WORKERS) $(PYTEST_ARGS)

# Apart: counting lines takes tests of plain Python nearly twice their time.
coverage: $(DEV) $(NODE) ## the same tests, and which lines they ran
	$(BIN)/python -m pytest -m "not long and not gpu" $(WORKERS) \
	  --cov --cov-report=term:skip-covered --cov-report=xml:var/coverage.xml $(PYTEST_ARGS)

test-long: $(DEV) $(NODE) ## golden parity, soak and fault suites
	$(BIN)/python -m pytest -m "long and not gpu" $(WORKERS) $(PYTEST_ARGS)

test-faults: $(DEV) ## the fault suites alone; prints fault x stage: lost, wrong, time to recover
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

golden: $(DEV) ## numerical parity with the reference logits only
	$(BIN)/python -m pytest tests/integration/golden -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(DEV) ## kernels and services on an NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu -m gpu -rs $(PYTEST_ARGS)

fmt: $(DEV) ## format and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(DEV) ## ruff, import contracts, buf
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/buf lint

types: $(DEV) ## pyright, strict
	$(BIN)/pyright

protos: $(DEV) ## regenerate the checked-in code from the .proto files
	$(BIN)/python protos/generate.py

bench: $(DEV) ## op benchmarks of the kernels on this machine
	$(BIN)/python -m lorikeet_kernels.bench
	$(BIN)/python -m lorikeet_kernels.bench_base

# Without the sanitizer first: that run says which result is wrong, and leaves compiled kernels in Triton's cache.
# Calls of CUDA that fail are no errors of a kernel: a launch that fails ends the run by itself.
SANITIZER := compute-sanitizer --error-exitcode 1 --report-api-errors no
sanitize: $(DEV) ## every kernel on small inputs under compute-sanitizer: memcheck, then racecheck
	@command -v compute-sanitizer >/dev/null 2>&1 || { \
	  echo "make: compute-sanitizer is not on PATH; it comes with NVIDIA's CUDA toolkit, often in /usr/local/cuda/bin" >&2; \
	  exit 1; }
	$(BIN)/python -m lorikeet_kernels.small_run
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck $(BIN)/python -m lorikeet_kernels.small_run
	$(SANITIZER) --tool racecheck $(BIN)/python -m lorikeet_kernels.small_run

clean: ## remove the venv and everything that tests and demos wrote
	rm -rf $(VENV) clients/node/node_modules build var .coverage .coverage.*
