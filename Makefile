PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# More than there are cores, since tests wait for other processes: 4 keep 2 cores busy.
PROCESSES ?= 4

.PHONY: help setup lint test test-all test-fast test-cpus test-cuda train train-hf check docs fuzz faults versions dist clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# The stamp holds the pins: another pyproject.toml or Python sets up again.
$(VENV)/.ready: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "megatron_cp needs Python 3.12 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup: $(VENV)/.ready ## make .venv with the pinned versions

lint: setup ## ruff and mypy
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/mypy --scripts-are-modules tools/cluster

# Hundreds of processes import this package: its bytecode is kept for them, whatever the environment says.
test test-all test-fast test-cpus test-cuda: export PYTHONDONTWRITEBYTECODE =

test: setup ## the tests that guard each feature: 10 to 25 minutes on 2 cores
	$(RUN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder -m "not thorough"

test-all: test ## all tests: those, and then the thorough ones
	$(RUN)/python -m pytest -n 2 --dist worksteal -m thorough

test-fast: setup ## the unit tests of `make test` alone
	$(RUN)/python -m pytest -n 2 --dist worksteal -m "not thorough" tests/unit_tests

test-cpus: setup ## the tests that compare what a CPU rounds, as CPUs with fewer and more instructions compute it
	$(RUN)/python -m tools.cpus -n 2 --dist worksteal

test-cuda: setup ## the tests of the CUDA path, on a GPU or else on an emulated one
	$(RUN)/python -m tools.nullgpu --or-gpu $(RUN)/python -m pytest -n 2 --dist worksteal -rs \
	  tests/functional_tests/test_cuda*.py

train: setup ## a packed hybrid Megatron model at CP=2 against CP=1, in minutes; ARGS="--context-parallel-size 3 ..."
	$(RUN)/megatron-cp train --context-parallel-size 2 --compare $(ARGS)

train-hf: setup ## a tiny Qwen3-Next of transformers at CP=2 with FSDP2 against the stock class on one rank, in minutes
	$(RUN)/python -W ignore examples/train_transformers.py --compare $(ARGS)

check: setup ## parity of both layers at several context-parallel sizes, every scheme and mask; 4 to 6 minutes on 2 cores
	$(RUN)/megatron-cp check --layer attention --lengths 7,1,130,64,2 --all
	$(RUN)/megatron-cp check --layer gdn --cp 2,3,5 --lengths 7,1,130,64,2 --heads 6 --key-heads 2 --dtype float64

$(VENV)/.docs: $(VENV)/.ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' || { \
	  echo "make docs needs the packages of the extra 'docs' (pyproject.toml), which pip did not get." >&2; exit 1; }
	@touch $@

docs: setup $(VENV)/.docs ## the site, in build/site/html: any warning, such as of a link that leads nowhere, is an error
	rm -rf build/site
	$(RUN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet --conf-dir tools/site \
	  --doctree-dir build/site/doctrees . build/site/html

fuzz: setup ## random cases of every operation against an oracle, for SECONDS=60 or CASES=n, from a new seed or SEED=n
	PYTHONPATH=. $(RUN)/python tools/fuzz.py $(if $(CASES),--cases $(CASES),--seconds $(or $(SECONDS),60)) \
	  $(if $(SEED),--seed $(SEED)) $(ARGS)

faults: setup ## random faults in small jobs of several ranks, for SECONDS=60, or COUNT=n of them; SEED=s
	$(RUN)/python -m tools.faults $(if $(COUNT),--count $(COUNT),--seconds $(or $(SECONDS),60)) \
	  $(if $(SEED),--seed $(SEED))

versions: setup ## the unit tests with other Pythons, torch and transformers, oldest to newest, and the table of them; ARGS="oldest --short"
	PYTHONPATH=. $(RUN)/python -m tools.versions $(or $(ARGS),--write)

dist: setup ## sdist and wheel in dist/, tried with each extra in a bare environment; ARGS="--build", "base megatron"
	PYTHONPATH=. $(RUN)/python -m tools.dist $(ARGS)

clean: ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
