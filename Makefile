# Everything happens in .venv, made on first use and installed by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Isolated builds obey the same versions: older pips read the first, newer the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# One thread for each process: a client turn is defined so, and tests run three at a
# time: one of them is mostly waiting for other processes (tests/conftest.py).
export OMP_NUM_THREADS := 1

# Compiled modules are kept: tests start hundreds of processes that import PyTorch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test whole coverage lint site format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

run: $(VENV)/.run  ## FedSPU beside local training on real digits, and a report
	$(BIN)/fedspu compare --methods fedspu,local --seeds 0,1,2 --out runs/first

test: $(VENV)/.dev  ## all tests; of three large grids a sample
	$(BIN)/pytest -n 3 --dist worksteal

whole: $(VENV)/.dev  ## all tests, with every point of large grids
	$(BIN)/pytest -n 3 --dist worksteal --whole

coverage: $(VENV)/.dev  ## all tests, and which lines and branches they reach
	$(BIN)/pytest -n 3 --dist worksteal --whole --cov --cov-report=term

lint: $(VENV)/.dev  ## format, lint, types and the direction of imports; changes nothing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

site: $(VENV)/.docs  ## the documentation as a site, in build/site; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -E -b html docs build/site
	@echo "Open build/site/index.html"

format: $(VENV)/.dev  ## put the code into its one format
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environment and all caches; results in runs/ stay
	rm -rf $(VENV) build dist .coverage .coverage.* .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Stamps: each is written last, so an interrupted step is taken again.
$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/pip install --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/pip install --no-compile -c constraints.txt -e ".[dev,plots,audio,images,hf,privacy,flower,ray,onnx,tensorboard,mlflow]"
	@touch $(VENV)/.run $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.run
	$(BIN)/pip install --no-compile -c constraints.txt -e ".[docs]"
	@touch $@
