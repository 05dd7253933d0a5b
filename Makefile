PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pip compiles one file after the other: COMPILE does on all cores, but for other packages' tests.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile
COMPILE := -m compileall -qq -j 0 -x '/tests?/'
# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

NUM ?= 300
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast docs pytest gpu-check mutants lint types format setup clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: setup  ## Find the fastest configuration of a 1.5B model for 12 GB; needs no GPU
	$(BIN)/autotune find --model Qwen/Qwen2.5-1.5B --gpu-mem 12GB

test: setup  ## Lint, check types, run every test that needs no GPU
	@$(MAKE) --no-print-directory --jobs 3 lint types pytest

test-fast: setup  ## The tests that start no process, in a minute or so: for the inner loop
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not worker and not slow"

pytest: setup
	AUTOTUNE_TEST_LOADERS=required $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

gpu-check: setup  ## Measure this machine's CUDA card against predictions: eight pieces of at most 9 minutes; again goes on
	$(BIN)/python -m tools.gpu_check processes predict operations kernels techniques find sweep speedups

docs: setup  ## Build the pages of docs/ into build/site; a warning fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

mutants: setup  ## Put NUM faults into the code one at a time and list those that no test notices; an hour
	$(BIN)/python -m validation.mutants --num $(NUM) --seed $(SEED)

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

format: setup  ## Let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)  ## Make .venv with the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt tests/loaders.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 14) or sys.exit("autotune needs Python 3.11 to 3.14, and %s is %d.%d: make PYTHON=python3.12" % (sys.executable, *v))'
	@echo "Installing into $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --requirement tests/loaders.txt
	@$(BIN)/python $(COMPILE) $(VENV)/lib || true  # Some packages have templates that are no Python.
	@touch $@

clean:  ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
