# What people run and what CI runs. Each target makes what it needs, and is quick when nothing changed.
#   make serve ARGS='--port 8123'     serve the demo model (or: make serve ARGS='MODEL --port 8123')
#   make test ARGS='tests/memory -x'  the suite; minutes on two cores
#   make test-heavy                   the runs that take minutes each
#   make lint                         ruff, mypy, import-linter
#   make bench ARGS=memory          every file of benchmarks/, or those whose path has the word

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints-dev.txt
ARGS ?=

# Several test processes on few cores: threads that wait for each other by spinning take the cores away.
test test-heavy: export OMP_NUM_THREADS ?= 1

.PHONY: serve test test-heavy lint format bench constraints clean help
help:
	@sed -n '2,6s/^# *//p' Makefile

$(BIN)/python:
	@echo '== making $(VENV) with $(shell $(PYTHON) --version)'
	@$(PYTHON) -c 'import sys; sys.exit("Kvarto needs Python 3.11 or newer; name one: make PYTHON=python3.11 …") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime-installed: pyproject.toml constraints-dev.txt | $(BIN)/python
	@echo '== installing Kvarto and PyTorch into $(VENV)'
	$(PIP_INSTALL) --editable '.[torch]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints-dev.txt | $(BIN)/python
	@echo '== installing Kvarto, PyTorch and the development tools into $(VENV)'
	$(PIP_INSTALL) --editable '.[torch,bench,dev]'
	@touch $@ $(VENV)/.runtime-installed

serve: $(VENV)/.runtime-installed
	$(BIN)/kvarto serve $(ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest $(ARGS)

test-heavy: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m heavy --timeout 3600 $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev-installed
	$(BIN)/python -m benchmarks $(ARGS)

constraints: $(VENV)/.dev-installed
	@sed -n '/^#/p' constraints-dev.txt > $(VENV)/constraints
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> $(VENV)/constraints
	@mv $(VENV)/constraints constraints-dev.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
