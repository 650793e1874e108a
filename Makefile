# `make demo` and `make test` set everything up by themselves.

PYTEST := .venv/bin/python -m pytest
# A file's tests stay together: they share engines, browsers and servers. tests/conftest.py orders the files.
TOGETHER := --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
# Container images set it, and each of the hundreds of processes that tests start would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo fleet check test slow prove lint bench docs site clean

help:
	@echo 'make demo    an engine with two incidents, the monitor and its page (DEMO_SECONDS=N ends it after N seconds)'
	@echo 'make fleet   three NATS nodes, four agents, two hubs and 50 engines with incidents (FLEET_SECONDS=N ends it)'
	@echo 'make check   ruff, mypy, the house and the unit tests'
	@echo 'make test    the tests, but for what is slow'
	@echo 'make slow    the slower tests, which CI runs too'
	@echo 'make prove   soaks and full matrices; writes build/proof.txt'
	@echo 'make lint    ruff and mypy'
	@echo 'make bench   the benchmarks'
	@echo 'make docs    writes what is generated from the code: docs, rules, dashboards'
	@echo 'make site    builds the documentation site in build/site; warnings are errors'
	@echo 'make clean   removes .venv and caches'

.venv/.ready: pyproject.toml constraints.txt scripts/setup.sh
	@sh scripts/setup.sh

demo: .venv/.ready
	@.venv/bin/python -m scripts.demo

fleet: .venv/.ready
	@.venv/bin/python -m scripts.fleet

check: lint
	$(PYTEST) -n 2 $(TOGETHER) -m unit

# Three workers on two cores: a worker often waits for what it started.
test: .venv/.ready
	@sh scripts/system_parts.sh
	$(PYTEST) -n 3 $(TOGETHER) -m 'not slow and not prove'

slow: .venv/.ready
	$(PYTEST) -n 3 $(TOGETHER) -m slow

prove: SHELL := /bin/bash -o pipefail
prove: .venv/.ready
	@mkdir -p build
	$(PYTEST) -m prove -q --durations=5 -o faulthandler_timeout=0 | tee build/proof.txt

# What mypy and editors need to find kvscope.engine and so on in a checkout.
build/names: scripts/package_names.sh
	@sh scripts/package_names.sh

lint: .venv/.ready build/names
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: .venv/.ready
	.venv/bin/python -m benchmarks.events
	.venv/bin/python -m benchmarks.detectors
	.venv/bin/python -m benchmarks.scrape
	.venv/bin/python -m benchmarks.history
	.venv/bin/python -m benchmarks.throughput
	.venv/bin/python -m benchmarks.kernels
	.venv/bin/python -m benchmarks.web
	.venv/bin/python -m benchmarks.hub

docs: .venv/.ready
	.venv/bin/python -m scripts.docs
	.venv/bin/python -m kvscope.dashboards.prometheus
	.venv/bin/python -m kvscope.dashboards.grafana
	.venv/bin/python -m tests.terminal.by_source

site: .venv/.ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
