# mmlab: every target makes .venv first, where it needs one, from CPython 3.11 or 3.12 with pip and venv.
#
#   PYTHON=path   the Python that .venv is made from (default: the first of the list below that fits)
#   ARGS="..."    Hydra overrides for `make train`, for example ARGS="schedule.steps=100"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test lint test-slow numerics format clean

PYTHON ?= python3.12 python3.11 python3 python
ARGS ?=
BASE ?=
BIN := .venv/bin
STAMP := .venv/.mmlab-installed

help: ## list the targets
	@printf 'make TARGET, where TARGET is one of\n'
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) \
	  | while IFS='|' read -r name text; do printf '%-13s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## make .venv and install mmlab with the tested versions (once)

train: $(STAMP) ## train the default experiment; ARGS="key=value ..." changes it
	$(BIN)/mmlab train $(ARGS)

lint: $(STAMP) ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, format and type checks, then every test that is not slow
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP) ## the slow proofs: kill and resume, two processes, whole runs
	$(BIN)/python -m pytest -m slow

numerics: $(STAMP) ## losses of tiny runs against BASE=rev; a difference needs a reason in CHANGELOG.md
	@test -n "$(BASE)" || { echo 'usage: make numerics BASE=rev   (for example BASE=HEAD or BASE=main~3)' >&2; exit 2; }
	$(BIN)/python -m experiments.benchmarks.numerics "$(BASE)"

format: $(STAMP) ## rewrite the source to the format and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A candidate must run (a pyenv shim may exist and fail), be CPython 3.11 or 3.12, and have venv with pip.
PROBE := import sys, venv, ensurepip; sys.exit(sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 12))

$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '$(PROBE)' 2>/dev/null; then \
	  found=''; chosen=''; \
	  for candidate in $(PYTHON); do \
	    if "$$candidate" -c '$(PROBE)' >/dev/null 2>&1; then chosen="$$candidate"; break; fi; \
	    answer="$$("$$candidate" --version 2>&1 || true)"; \
	    found+="  $$candidate: $${answer%%$$'\n'*}"$$'\n'; \
	  done; \
	  if [ -z "$$chosen" ]; then \
	    printf 'mmlab needs CPython 3.11 or 3.12 with the modules venv and ensurepip. Found:\n%s' "$$found" >&2; \
	    echo 'Name one with: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; \
	  fi; \
	  echo "making .venv with $$chosen ($$("$$chosen" --version))"; \
	  "$$chosen" -m venv --clear .venv; \
	fi
	$(BIN)/python -m pip install -e ".[dev]" -c constraints.txt
	@touch $@
