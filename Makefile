# make setup | demo | demo-models | test | quick | docs | mutants | chaos | gpu-check | lint | format | clean
#
#   PYTHON       the interpreter that makes .venv (python3)
#   DEVICE       what engines compute on: cpu, cuda, or auto (what .venv is for, else cuda where there is a driver)
#   DRIVER       later: do not look for the driver now, because what is set up is an image for other machines
#   TORCH_INDEX  where to find torch's CPU build (PyTorch's own index, if
#                pip's configuration knows of no CPU build); empty: only pip's configuration
#   PYTEST_ARGS  what pytest is to run instead of everything, e.g. PYTEST_ARGS="tests/unit -x"
#   CHAOS_ARGS   options of `make chaos`, e.g. CHAOS_ARGS="--seed 7 --faults 20 --requests 200 --seconds 90"
#   JOBS         tests that run at once, of those that may run beside others (a process for each core)
#
# Paths are relative to this file's folder, so the checkout may have spaces in its path.

PYTHON      ?= python3
DEVICE      ?= auto
DRIVER      ?= now
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
CHAOS_ARGS  ?=
JOBS        ?= auto

SHELL := /bin/sh
# torch's threads would wait for each other where every core has a process of its own
EACH := OMP_NUM_THREADS=1
PY    := .venv/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check install -qq --no-deps --no-compile

# What .venv was made from. The folder counts too: a moved checkout needs its scripts written again.
STAMP   := .venv/p2pserve-setup
MADE_FOR := .venv/p2pserve-device
LOCKS    = requirements/lock.txt "requirements/lock-$$device.txt"
CONTENT  = { pwd; echo "$$device"; cat pyproject.toml $(LOCKS) requirements/torch.txt; } 2>/dev/null | cksum

# Unless TORCH_INDEX was given: a CPU build that pip finds without it is as good, and may be nearer.
KNOWN_TORCH = $(if $(filter file,$(origin TORCH_INDEX)),$(PIP) "$$(grep '^torch==' requirements/torch.txt)+cpu" 2>/dev/null ||)

# Tests of processes that failed run once more, alone: a shared machine may stand still for seconds. Twice is a failure.
# pytest's 1 is a failed test; whatever else ends it, such as a test that cannot be imported, counts at once.
ONCE_MORE = test $$? = 1 && echo "test: what failed, once more by itself" && $(PY) -m pytest -q --last-failed --last-failed-no-failures none

.PHONY: setup demo demo-models test quick docs mutants chaos gpu-check lint format clean
.DEFAULT_GOAL := setup
.NOTPARALLEL:

# trio-stubs comes with trio-typing, which libp2p imports; those stubs are years old and hide trio's own annotations.
setup:
	@device='$(DEVICE)'; \
	if [ "$$device" = auto ] && [ -f $(MADE_FOR) ]; then device=$$(cat $(MADE_FOR)); fi; \
	if [ -f $(STAMP) ] && $(PY) -c '' 2>/dev/null && [ "$$($(CONTENT))" = "$$(cat $(STAMP))" ]; then exit 0; fi; \
	set -e; \
	command -v $(PYTHON) >/dev/null || { \
		echo "setup: no '$(PYTHON)' is found (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "setup: '$(PYTHON)' is not a Python 3.11 or newer; say which one is: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	renew=$$([ -f $(STAMP) ] && [ "$$device" = "$$(cat $(MADE_FOR))" ] && echo --renew || true); \
	device=$$($(PYTHON) -P node/box/prerequisites.py "$$device" $(if $(filter later,$(DRIVER)),--driver-later) $$renew); \
	rm -f $(STAMP); \
	: 'Engines for different devices have files of the same names: none of one may be left beside the other.'; \
	if ! $(PY) -m pip --version >/dev/null 2>&1 || [ "$$device" != "$$(cat $(MADE_FOR) 2>/dev/null || echo cpu)" ]; then \
		echo "setup: making .venv"; \
		$(PYTHON) -m venv --clear .venv || { \
			echo "setup: '$(PYTHON) -m venv' failed (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }; \
	fi; \
	echo "$$device" > $(MADE_FOR); \
	if [ "$$device" = cpu ]; then \
		echo "setup: torch (about 200 MB)"; \
		$(KNOWN_TORCH) $(PIP) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") -r requirements/torch.txt; \
		about="some minutes the first time"; \
	else \
		: 'The archives would stay in the cache beside what is made of them; a rented disk is small.'; \
		export PIP_NO_CACHE_DIR=1; \
		about="4 GB to download, 10 GB of disk"; \
	fi; \
	echo "setup: $$(cat $(LOCKS) | grep -c '^[A-Za-z].*==') pinned packages ($$about)"; \
	: 'Two distributions come as source only; the pinned setuptools builds them, not one fetched for the occasion.'; \
	awk '/^[A-Za-z]/ { on = /^setuptools==/ } on' requirements/lock.txt > .venv/build-tools.txt; \
	$(PIP) --require-hashes -r .venv/build-tools.txt; \
	$(PIP) --require-hashes --use-pep517 --no-build-isolation -r requirements/lock.txt -r "requirements/lock-$$device.txt"; \
	rm -rf .venv/lib/python3*/site-packages/trio-stubs; \
	echo "setup: p2pserve itself"; \
	$(PIP) --no-build-isolation -e .; \
	: 'What pip would compile on one core, on all of them; some files are of other Pythons, or templates.'; \
	$(PY) -m compileall -qq -j 0 .venv/lib || true; \
	$(PY) -c 'import torch' || { \
		$(PY) -m pip uninstall --quiet --yes torch; \
		if [ "$$device" = cpu ]; then \
			echo "setup: torch does not start; name an index that has its CPU build: make setup TORCH_INDEX=..." >&2; \
		else \
			echo "setup: torch does not start on this system (see above); it wants Linux on x86-64 with glibc 2.28" >&2; \
		fi; \
		exit 1; }; \
	: 'Engines on a CPU load it; by themselves they build it after 64 MiB of KV, and a demo has less.'; \
	[ "$$device" != cpu ] || { echo "setup: the kv4 codec in C++"; P2PSERVE_KERNELS=compiled $(PY) -c \
		'from p2pserve.kernels.codec import load_built; load_built("kv4")'; }; \
	$(CONTENT) > $(STAMP); \
	echo "setup: done, for $$device; next: make demo, or .venv/bin/p2pserve --help"

demo: setup
	@.venv/bin/p2pserve demo

demo-models: setup
	@.venv/bin/p2pserve demo --models

test: lint
ifneq ($(PYTEST_ARGS),)
	@echo "test: pytest"
	@$(PY) -m pytest -q $(PYTEST_ARGS)
else
	@echo "test: pytest, pure code on $(JOBS) processes"
	@$(EACH) $(PY) -m pytest -q -n $(JOBS) tests/unit tests/sim
	@echo "test: pytest, sockets and processes on $(JOBS) processes"
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m beside tests/integration || \
		{ $(ONCE_MORE) -m beside tests/integration; }
	@echo "test: pytest, sockets and processes by themselves"
	@$(PY) -m pytest -q -m "not beside" tests/integration tests/gpu || \
		{ $(ONCE_MORE) -m "not beside" tests/integration tests/gpu; }
endif

# What to run while at work: style, types, and all that is pure.
quick: lint
	@echo "quick: pytest, unit tests on $(JOBS) processes"
	@$(EACH) $(PY) -m pytest -q -n $(JOBS) tests/unit

# The pages as a site, in build/site; nothing in it is loaded from elsewhere.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

# Whether unit tests notice small faults in the modules that decide (see tests/mutants.py). Some ten minutes on two cores.
mutants: setup
	@$(PY) -m tests.mutants

# A network of real processes that is harmed in every way under streams of clients (docs/chaos.md). Twenty minutes.
chaos: setup
	@$(PY) -m p2pserve.sdk.chaos $(CHAOS_ARGS)

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
