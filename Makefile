# make demo, make test: everything on a fresh machine with Python >= 3.11 and make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PYTHONDONTWRITEBYTECODE :=  # dozens of processes would compile every module anew

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS_READY := .peers/.ready
TEST_PROCESSES ?= auto

.PHONY: help demo test check prove peers map

help:
	@echo "make demo    train a small model on real text, export, reload, generate, compare"
	@echo "make test    run the tests"
	@echo "make check   format, lint, types, layers, spelling"
	@echo "make prove   run the long proofs and record their figures"
	@echo "make peers   agreement and speed beside other implementations (own environment)"
	@echo "make map     write docs/report_map.md and the pinned list of CLI options"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "==> Installing the pinned versions into .venv (first run: a few minutes)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@echo "==> Demo: train, export, reload, generate, compare"
	@$(BIN)/python -m demo

# torch.compile and the jaxtyping import hook exclude each other, hence two calls. The compile
# tests come first, so that the last line is the closing line of the whole suite. loadgroup keeps
# the tests of one golden set in one process, which traces it once.
test: $(READY)
	@echo "==> Tests of torch.compile"
	@$(BIN)/python -m pytest -o addopts= --import-mode=importlib --strict-markers -m compile
	@echo "==> All other tests"
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --maxprocesses 8 --dist loadgroup

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Without the jaxtyping import hook, which slows every call.
prove: $(READY)
	@echo "==> Long proofs; figures go to benchmarks/results/prove.jsonl"
	@$(BIN)/python -m pytest -o addopts= --import-mode=importlib --strict-markers -m prove

$(PEERS_READY): tests/peers/requirements.txt tests/peers/peers.txt tests/peers/optional.txt
	@echo "==> Installing the peers into .peers (own environment, a few minutes)"
	@[ -x .peers/bin/python ] || $(PYTHON) -m venv .peers
	.peers/bin/python -m pip install --disable-pip-version-check -r tests/peers/requirements.txt
	.peers/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/peers/peers.txt
	.peers/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/peers/optional.txt || \
	  echo "==> These do not install here and are left out: tests/peers/optional.txt" >&2
	@touch $@

peers: $(PEERS_READY)
	@echo "==> Agreement and speed beside other implementations"
	@PYTHONPATH=src:. .peers/bin/python -m tests.peers.run

map: $(READY)
	$(BIN)/openv41 where --markdown > docs/report_map.md
	$(BIN)/python -m tests.meta.cli_options
