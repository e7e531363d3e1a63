# Two commands do all their own set-up: `make demo` and `make test`. They need Python 3.11 or later, and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit bench clean

demo: $(VENV)/.installed
	$(BIN)/python -m wirings demo

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.select
	$(BIN)/python -m benchmarks.wired_step

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("wirings needs Python 3.11 or later, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
