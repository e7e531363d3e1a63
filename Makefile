# `make demo`, `make test` and `make docs` set up everything they need, given Python 3.11 or later.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit soak sanitize docs package browser bench clean

demo: $(VENV)/.installed
	$(BIN)/python -m wirings demo

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.check_imports

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Fuzzes everything for as long as one asks: files, settings, command lines, wirings, graphs, programs and interrupted
# runs. Another SEED tries other cases.
MINUTES ?= 10
SEED ?= $(shell date +%s)
soak: $(VENV)/.installed
	$(BIN)/python -m tests.sanitize --no-tests --cases 1000000000 --seed $(SEED) \
		--minutes $$(awk 'BEGIN { print 0.1 * $(MINUTES) }')
	$(BIN)/python -m tests.fuzz --cases 1000000000 --seed $(SEED) --minutes $$(awk 'BEGIN { print 0.9 * $(MINUTES) }')

# The engine's tests and random programs, with kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.installed
	$(BIN)/python -m tests.sanitize

# The documentation site, in build/site. Builds offline, and fails on broken links and missing references.
docs: $(VENV)/.installed
	$(BIN)/python docs/build.py

# The source and binary distributions, and a trial of the wheel in an empty environment, outside of the checkout.
package: $(VENV)/.installed
	rm -rf build/package
	mkdir -p build/package/empty
	$(BIN)/python -m build --outdir build/package .
	$(PYTHON) -m venv build/package/venv
	build/package/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(echo build/package/wirings-*.whl)[train]"
	cp tools/smoke_test.py build/package/empty/
	cd build/package/empty && ../venv/bin/python smoke_test.py

# A browser for the tests of the HTML page, which are skipped without one. Installed only where nobody has to be asked.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) > /dev/null 2>&1; \
	fi; \
	command -v chromium > /dev/null || echo "no Chromium could be installed: the tests of the page will be skipped"

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.select
	$(BIN)/python -m benchmarks.wired_step

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("wirings needs Python 3.11 or later, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
