# The verbs of this repository. `make run` and `make test` need nothing but Python 3.11 or newer.
#   make run [NAME=tiny] [SEED=1]   train the embedded model and print the summary
#   make test                       the whole test suite
#   make check                      format, lint and types, changing nothing;  make format changes
#   make bench                      measure, print the figures
#   make clean                      remove what dead runs left in memory
#   LOCK=requirements.lock          to any of these: install vLLM's CPU build although there is an NVIDIA GPU

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
LOCK := $(shell nvidia-smi -L >/dev/null 2>&1 && echo requirements-gpu.lock || echo requirements.lock)
TORCH := $(shell grep '^torch==' '$(LOCK)')

# The stamp names its lock. Another lock needs an empty environment: vLLM's two builds write the same files.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(LOCK))
CLEAR := --clear
.PHONY: $(INSTALLED)
endif

help:
	@sed -n 's/^#   //p' Makefile

# Done once, and again when the lock or the project file changes. torch comes first and alone: a version asked for
# exactly is where pip takes a CPU build if its configuration offers one. The rest is installed as the lock lists it,
# without what the packages ask for besides (the lock's header says why).
$(INSTALLED): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: Python 3.11 or newer is needed, found $$($(PYTHON) --version 2>&1): make PYTHON=python3.11" >&2; exit 1; }
	@echo "installing $(LOCK) into .venv (once; torch is large)" >&2
	$(PYTHON) -m venv $(CLEAR) .venv
	$(PIP) install '$(TORCH)'
	$(PIP) install --no-deps --requirement '$(LOCK)'
	$(PIP) install --no-deps --no-build-isolation --editable .
	@echo '$(LOCK)' > $@

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
