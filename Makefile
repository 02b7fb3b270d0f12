# Every target first brings the environment up to date (scripts/bootstrap); that takes a blink when it is.
# Without make: sh scripts/bootstrap, then the commands below from .venv/bin.
#
#   make install        the environment with everything, and what needs the network once
#   make demo           create orders, break things, prove that each was charged once   (ORDERS=1000)
#   make up             PostgreSQL, Kafka and both services in the foreground, until Ctrl-C   (PORT_BASE=8001)
#   make test           the tests   (T="tests/unit -k money" for some of them)
#   make check          format, lint, types, import contracts
#   make bench          every benchmark, each against its baseline, some 15 minutes; the machine should be idle
#   make bench-relay    the relay's alone   (BENCH="--only drain --rounds 3"; --help lists what there is)
#   make bench-billing  billing's consumer   (BENCH likewise)
#   make test-compose   the containers of compose.yaml under kills and restarts; needs Docker
#   make requirements   pin the three requirements files anew from pyproject.toml   (UPGRADE=--upgrade)
#   make clean          remove var (unless a run uses it) and the tools' caches; the environment stays

VENV := $(or $(CHARGEONCE_VENV),.venv)
VAR := $(or $(CHARGEONCE_VAR),var)
ORDERS ?= 1000
PORT_BASE ?= 8001
T ?=
BENCH ?=
UV ?= uv
UPGRADE ?=
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	--no-emit-find-links

.DEFAULT_GOAL := help
.PHONY: help install lab dev demo up test check bench bench-relay bench-billing test-compose requirements clean

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

lab dev:
	@sh scripts/bootstrap $@

install: dev

demo: lab
	@$(VENV)/bin/chargeonce demo --orders $(ORDERS)

up: lab
	@$(VENV)/bin/chargeonce up --port-base $(PORT_BASE)

test: dev
	$(VENV)/bin/python -m pytest $(T)

# Tools that need no PostgreSQL and no Kafka do not ask for their memory.
install check test-compose: export CHARGEONCE_MIN_MEMORY_MB = 0

check: dev
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: bench-relay bench-billing

bench-relay: lab
	@CHARGEONCE_VAR='$(VAR)' $(VENV)/bin/python -m tests.benchmarks.relay $(BENCH)

bench-billing: lab
	@CHARGEONCE_VAR='$(VAR)' $(VENV)/bin/python -m tests.benchmarks.billing $(BENCH)

test-compose: dev
	$(VENV)/bin/python -m pytest tests/compose

# The largest set is pinned first; the others start from its pins, so that all three agree.
requirements:
	$(COMPILE) $(UPGRADE) --extra lab --extra dev --output-file requirements-dev.txt pyproject.toml
	cp requirements-dev.txt requirements-lab.txt
	$(COMPILE) --extra lab --output-file requirements-lab.txt pyproject.toml
	cp requirements-lab.txt requirements.txt
	$(COMPILE) --output-file requirements.txt pyproject.toml

# Without the environment nobody could tell whether a run uses var, or find what lies elsewhere.
clean:
	@if test -x $(VENV)/bin/chargeonce; then CHARGEONCE_VAR='$(VAR)' $(VENV)/bin/chargeonce clean; \
	elif test -e '$(VAR)'; then echo "make: $(VAR) stays: what removes it is not installed. First: make lab" >&2; exit 2; fi
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
