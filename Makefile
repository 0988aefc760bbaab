# One command each; every target sets up what it needs on a fresh machine (Python 3.11 to 3.13 and make).
#   make run                    the main job: train, evaluate, lesson 0, one table
#   make TORCH=installed run    keep this machine's own torch and torchvision
#   make PYTHON=python3.12 run  choose the Python

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# Read when torch loads its OpenMP library: idle threads must sleep, not spin.
export OMP_WAIT_POLICY := PASSIVE

VENV := .venv
BIN := $(VENV)/bin
# A machine set up once with its own torch stays so without saying it again.
TORCH ?= $(if $(wildcard $(VENV)/stamp-installed),installed,pinned)
STAMP := $(VENV)/stamp-$(TORCH)
ARGS ?=

.PHONY: help setup run test quick test-full lab lessons data bench check pins format clean clean-all
help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

setup: $(STAMP) ## the virtual environment alone

run: $(STAMP) ## train openclip, gcl-batch and neuclip on icons, evaluate, lesson 0, one table (3 to 5 minutes on 2 idle cores)
	$(BIN)/python -m neuclip_lib run $(ARGS)

test: $(STAMP) ## all tests, two files at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

quick: $(STAMP) ## unit tests of the core, under 60 s
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m quick tests/core $(ARGS)

test-full: $(STAMP) ## everything, full presets too; takes long, goes on where it stopped
	$(BIN)/python tests/full.py $(ARGS)

lab: $(STAMP) ## JupyterLab on your own copy of the lessons (my_lessons/)
	$(BIN)/python -m neuclip_lib lessons copy my_lessons
	$(BIN)/jupyter lab --notebook-dir=my_lessons $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

lessons: $(STAMP) ## rebuild the notebooks from their sources
	$(BIN)/python -m neuclip_lib lessons build $(ARGS)

data: $(STAMP) ## build all data sets
	$(BIN)/python -m neuclip_lib data build all $(ARGS)

bench: $(STAMP) ## performance ratios
	$(BIN)/python -m neuclip_lib bench $(ARGS)

check: $(STAMP) ## format, lint, types, generated files up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python .ci/pins.py --check
	$(BIN)/python -m neuclip_lib lessons check
	$(BIN)/python -m neuclip_lib data card --check
	$(BIN)/python -m neuclip_lib readme --check
	$(BIN)/python tests/full.py --check

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pins: $(STAMP) ## write requirements.txt from what is installed
	$(BIN)/python .ci/pins.py

clean: ## remove caches, keep the environment, data and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find neuclip_lib tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove the environment, the built data and the runs as well
	rm -rf $(VENV) datasets/built runs

# The stamp is newer than what it was installed from, or make installs again (seconds when nothing changed).
$(STAMP): requirements.txt pyproject.toml .ci/setup
	bash .ci/setup $(VENV) $(TORCH) $(PYTHON)
	@touch $@
