# Everything works from a fresh clone and from any half-finished state: what is missing is installed first.
#
#   make serve ARGS="--port 9000 /path/to/checkpoint"
#   make test
#
# PYTHON  an interpreter of version 3.11 or newer (found by itself otherwise)
# TORCH   what pip installs as torch, with options where needed; empty for none. For the CPU build everywhere:
#         make serve TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# ARGS    arguments of `weft serve`; PYTEST_ARGS those of pytest
# EXTRAS  more of pyproject.toml's extras for `make test`, such as llama-cpp (its tests are skipped without it)

TORCH ?= torch==2.13.0
EXTRAS ?=
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
# A stamp is written after an install has succeeded; its name changes with what was asked for.
KEY := $(shell { cat pyproject.toml; echo '$(TORCH) $(EXTRAS)'; } | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help serve test install install-dev venv lint format docs clean distclean

help:
	@echo 'make serve      install what is missing, then serve (the bundled demo model without ARGS="MODEL")'
	@echo 'make test       linters, types, import rules, tests'
	@echo 'make lint       the same without the tests'
	@echo 'make format     ruff formats and sorts imports'
	@echo 'make docs       writes docs/configuration.md from the settings'
	@echo 'make install    everything that serving needs, in .venv'
	@echo 'make clean      removes caches and build output; distclean also removes .venv'

# exec: signals reach the server itself, and it is the server whose exit code make reports.
serve: install
	@exec $(BIN)/weft serve $(ARGS)

# The linters come first, so that pytest's summary is the last thing printed.
test: lint
	@exec $(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: install-dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'not formatted; run: make format' >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: install-dev
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

docs: install-dev
	@$(BIN)/python tools/docs/configuration.py

comma := ,

# install_into(STAMP NAMES, REQUIREMENTS). Output goes to stderr: the first line on stdout is the server's.
# A pip that was killed leaves packages without their INSTALLER file (pip writes it last) that look installed; they are
# forgotten here, so that pip puts them in again. torch goes first and alone: a range would let pip choose another
# build, and once it is there the range is satisfied.
define install_into
	@test -e $(VENV)/.weft-$(firstword $(1))-$(KEY) || { \
		echo 'installing $(2) into $(VENV) (minutes the first time)'; \
		for d in $(VENV)/lib/python*/site-packages/*.dist-info; do \
			test ! -d "$$d" || test -e "$$d/INSTALLER" || rm -rf "$$d"; \
		done; \
		$(if $(strip $(TORCH)),$(PIP) install $(TORCH) &&) $(PIP) install -e '$(2)' && \
		for name in $(1); do rm -f $(VENV)/.weft-$$name-* && touch $(VENV)/.weft-$$name-$(KEY) || exit 1; done; \
	} >&2
endef

install: venv
	$(call install_into,runtime,.[torch])

install-dev: venv
	$(call install_into,dev runtime,.[torch$(comma)dev$(addprefix $(comma),$(EXTRAS))])

# `activate` is the last file that venv writes, and names its folder: without it the creation was cut short, and with
# another folder in it the checkout has moved, which breaks every script inside.
venv:
	@if $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& grep -qsF '$(CURDIR)/$(VENV)' $(BIN)/activate; then exit 0; fi; \
	for python in $(if $(PYTHON),'$(PYTHON)',python3.13 python3.12 python3.11 python3); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			rm -rf $(VENV) && exec "$$python" -m venv $(VENV) >&2; \
		fi; \
	done; \
	echo 'no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3' >&2; exit 1

clean:
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	@rm -rf $(VENV)
