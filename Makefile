# Two commands start here: `make quickstart` and `make test`. Each sets up what it needs by itself (.ci/setup.sh).
#
#   ARGS="…"    passed on: overrides (`make quickstart ARGS="seed=3"`) or pytest's options (`make test ARGS="-k mesh"`)
#   VENV=.venv  EXTRAS=cpu,test  PYTHON=python3.11   see .ci/setup.sh

SHELL := /bin/bash
VENV ?= .venv
EXTRAS ?= cpu,test
BIN = $(VENV)/bin
export VENV EXTRAS PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup quickstart plan doctor test lint format lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## make the virtual environment, or bring it up to date
	@bash .ci/setup.sh

quickstart: export FOR_A_RUN = 1
quickstart: setup ## set up and run the main job: pretrain, RL with real sandboxes, evaluation (ARGS: overrides)
	@$(BIN)/composer $(ARGS)

plan: setup ## print what a run would do and start nothing (ARGS: overrides)
	@$(BIN)/composer plan $(ARGS)

doctor: setup ## say what this machine has and lacks
	@$(BIN)/composer doctor $(ARGS)

test: setup ## set up and run all the tests, lint and types among them (ARGS: pytest's options)
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## style, formatting, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: setup ## put the code into the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: setup ## write .ci/constraints.txt anew, with the newest versions that pyproject.toml allows
	@$(BIN)/python .ci/lock.py

clean: ## remove the virtual environment and all caches (runs/ stays)
	if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
