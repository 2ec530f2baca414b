# make setup | demo | test | gpu-check | lint | format | clean
#
#   PYTHON       the interpreter that makes .venv (python3)
#   TORCH_INDEX  where to find torch's CPU build (PyTorch's own index, if
#                pip's configuration knows of no CPU build); empty: only pip's configuration
#   PYTEST_ARGS  what pytest is to run instead of everything, e.g. PYTEST_ARGS="tests/unit -x"
#   JOBS         tests that run at once, of those that may run beside others (a process for each core)
#
# Paths are relative to this file's folder, so the checkout may have spaces in its path.

PYTHON      ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
JOBS        ?= auto

SHELL := /bin/sh
PY    := .venv/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check install -qq --no-deps --no-compile

# What .venv was made from. The folder counts too: a moved checkout needs its scripts written again.
STAMP   := .venv/p2pserve-setup
CONTENT  = { pwd; cat pyproject.toml requirements/lock.txt requirements/torch.txt; } | cksum

# Unless TORCH_INDEX was given: a CPU build that pip finds without it is as good, and may be nearer.
KNOWN_TORCH = $(if $(filter file,$(origin TORCH_INDEX)),$(PIP) "$$(grep '^torch==' requirements/torch.txt)+cpu" 2>/dev/null ||)

.PHONY: setup demo test gpu-check lint format clean
.DEFAULT_GOAL := setup
.NOTPARALLEL:

# trio-stubs comes with trio-typing, which libp2p imports; those stubs are years old and hide trio's own annotations.
setup:
	@if [ -f $(STAMP) ] && $(PY) -c '' 2>/dev/null && [ "$$($(CONTENT))" = "$$(cat $(STAMP))" ]; then exit 0; fi; \
	set -e; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "setup: '$(PYTHON)' is not a Python 3.11 or newer; say which one is: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	command -v "$${CC:-cc}" >/dev/null 2>&1 || { \
		echo "setup: no C compiler '$${CC:-cc}'; install one (Debian, Ubuntu: apt-get install build-essential) or name it: make setup CC=gcc" >&2; exit 1; }; \
	rm -f $(STAMP); \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		echo "setup: making .venv"; \
		$(PYTHON) -m venv --clear .venv || { \
			echo "setup: '$(PYTHON) -m venv' failed (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }; \
	fi; \
	echo "setup: torch (about 200 MB)"; \
	$(KNOWN_TORCH) $(PIP) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") -r requirements/torch.txt; \
	echo "setup: $$(grep -c '^[A-Za-z].*==' requirements/lock.txt) pinned packages (some minutes the first time)"; \
	: 'Two distributions come as source only; the pinned setuptools builds them, not one fetched for the occasion.'; \
	awk '/^[A-Za-z]/ { on = /^setuptools==/ } on' requirements/lock.txt > .venv/build-tools.txt; \
	$(PIP) --require-hashes -r .venv/build-tools.txt; \
	$(PIP) --require-hashes --use-pep517 --no-build-isolation -r requirements/lock.txt; \
	rm -rf .venv/lib/python3*/site-packages/trio-stubs; \
	echo "setup: p2pserve itself"; \
	$(PIP) --no-build-isolation -e .; \
	: 'What pip would compile on one core, on all of them; some files are of other Pythons, or templates.'; \
	$(PY) -m compileall -qq -j 0 .venv/lib || true; \
	$(PY) -c 'import torch' || { \
		$(PY) -m pip uninstall --quiet --yes torch; \
		echo "setup: torch does not start; name an index that has its CPU build: make setup TORCH_INDEX=..." >&2; exit 1; }; \
	$(CONTENT) > $(STAMP); \
	echo "setup: done; next: make demo, or .venv/bin/p2pserve --help"

demo: setup
	@.venv/bin/p2pserve demo

test: lint
ifneq ($(PYTEST_ARGS),)
	@echo "test: pytest"
	@$(PY) -m pytest -q $(PYTEST_ARGS)
else
	@echo "test: pytest, pure code on $(JOBS) processes"
	@$(PY) -m pytest -q -n $(JOBS) tests/unit tests/sim
	@echo "test: pytest, sockets and processes on $(JOBS) processes"
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m beside tests/integration
	@echo "test: pytest, sockets and processes by themselves"
	@$(PY) -m pytest -q -m "not beside" tests/integration tests/gpu
endif

# Half an hour on one GPU; writes gpu-check.json.
gpu-check: DEVICE = cuda
gpu-check: setup
	@.venv/bin/p2pserve selftest --full

lint: setup
	@echo "lint: ruff check"
	@$(PY) -m ruff check --quiet .
	@echo "lint: ruff format"
	@$(PY) -m ruff format --quiet --check . || { echo "lint: some files are not formatted; run: make format" >&2; exit 1; }
	@echo "lint: mypy"
	@$(PY) -m mypy --no-error-summary

format: setup
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

clean:
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	@find . -name .git -prune -o -name .venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
