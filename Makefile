# Every target makes what it needs; the second time is quick. `make setup PYTHON=python3.12` picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEER ?= .venv-peer

.PHONY: setup test explore demo lint types docs-tables bench clean

setup: $(VENV)/.installed

# torch goes first and by its exact version: other forms of the request may bring gigabytes of GPU libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: lint types
	$(BIN)/python -m pytest -n auto --dist loadfile

# The property tests once more with new examples, ROUNDS times; `make test` takes the same ones each time.
ROUNDS ?= 10
explore: setup
	for round in $$(seq $(ROUNDS)); do \
	  HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -q -n auto --dist loadfile -m hypothesis || exit 1; \
	done

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

demo: setup
	$(BIN)/python examples/observe_weights.py

docs-tables: setup
	$(BIN)/python tools/write_docs_tables.py

# Parts of it: `make bench BENCH_ARGS="--only optimal --quick"`.
bench: setup $(PEER)/.installed
	$(BIN)/python -m bench.run --peer $(PEER)/bin/python $(BENCH_ARGS)

$(PEER)/.installed: constraints.txt
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) llmcompressor==0.14.0.1
	touch $@

clean:
	rm -rf $(VENV) .venv-peer .mypy_cache .pytest_cache .ruff_cache .hypothesis
