# The verbs of this repository. `make run` and `make test` need nothing but Python 3.11 or newer.
#   make run [NAME=tiny] [SEED=1]   train the embedded model and print the summary
#   make test                       the whole test suite
#   make check                      format, lint and types, changing nothing;  make format changes
#   make bench                      measure, print the figures
#   make clean                      remove what dead runs left in memory

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help run test check format bench clean

PYTHON ?= python3
NAME ?= tiny
SEED ?= 1
TESTS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
TORCH := $(shell grep '^torch==' requirements.lock)

help:
	@sed -n 's/^#   //p' Makefile

# Done once, and again when the lock or the project file changes. torch comes first and alone: a version asked for
# exactly is where pip takes a CPU build if its configuration offers one, and the rest then finds torch installed.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: Python 3.11 or newer is needed, found $$($(PYTHON) --version 2>&1): make PYTHON=python3.11" >&2; exit 1; }
	@echo "installing into .venv (once; torch is large)" >&2
	$(PYTHON) -m venv .venv
	$(PIP) install '$(TORCH)'
	$(PIP) install --requirement requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

run: $(INSTALLED)
	@$(BIN)/quartet up tiny --name '$(NAME)' --seed '$(SEED)'

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(TESTS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	@$(BIN)/quartet bench

clean: $(INSTALLED)
	@$(BIN)/quartet clean
