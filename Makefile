# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
SEED   ?= 0
NAME   ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-browser test-atropos test-vllm check format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# One stamp a set of extras, remade when what it was made from changes.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "atropos_gym needs Python 3.11 or newer; name one with PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.learn: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[learn]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[learn,test]'
	@touch $@ $(VENV)/.learn

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[learn,dev]'
	@touch $@ $(VENV)/.learn $(VENV)/.test

demo: $(VENV)/.learn  ## a tiny language model learns Blackjack; the path of its report is printed
	$(BIN)/atropos-gym train --seed $(SEED) $(if $(NAME),--name $(NAME))

test: $(VENV)/.test  ## the unit suite, on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.test  ## what takes longer: real models, whole jobs
	$(BIN)/python -m pytest -m slow

test-browser: $(VENV)/.test  ## the pages in headless Chromium
	$(BIN)/python -m pytest -m browser

test-atropos: $(VENV)/.test .venv-atropos/.made  ## unmodified environments of atroposlib against the batch server
	$(BIN)/python -m pytest -m atropos tests/conformity

.venv-atropos/.made: tests/conformity/requirements.txt
	$(PYTHON) -m venv .venv-atropos
	.venv-atropos/bin/python -m pip install --disable-pip-version-check -q --no-deps -r $<
	@touch $@

test-vllm: $(VENV)/.test .venv-vllm/.made  ## a learner and stock vLLM on a CPU: minutes to install, minutes to start
	$(BIN)/python -m pytest -m vllm tests/vllm

# Complete as it is; the file says what is left out of what vLLM asks for, and why.
.venv-vllm/.made: tests/vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -q --no-deps -r $<
	@touch $@

check: $(VENV)/.dev  ## format, lint, types, layers, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.dev  ## mend format and imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove environment, caches and runs
	rm -rf $(VENV) .venv-atropos .venv-vllm runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
