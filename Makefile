# make            what there is
# make quickstart plans, trains and compares on this machine; needs no GPU
# make test       every test but the slow ones: five minutes on two cores
# make test-all   make test, the slow tests, deliberate errors, adapters on the real packages, other Megatrons and torches
# make docs       the documentation, into build/site; a warning is an error
# make lint       style, formatting, import contracts, types

PYTHON := .venv/bin/python
SHELL := /bin/bash -o pipefail

.PHONY: help .venv quickstart test test-all lint docs clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

.venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@if ! $(PYTHON) -c '' 2>/dev/null; then \
		python=$$(.ci/find_python.sh) && echo "Making .venv with $$python" && "$$python" -m venv --clear .venv; \
	fi
	@if [ ! -e /dev/nvidia0 ] && $(PYTHON) -m pip install --quiet --constraint constraints.txt \
		"$$(grep '^torch==' constraints.txt)+cpu" triton 2>/dev/null; then \
		echo "Installing Megatron Core; PyTorch is the CPU build, without CUDA's libraries"; \
	else \
		echo "Installing PyTorch with CUDA's libraries and Megatron Core, about 5 GB to download"; \
		[ -e /dev/nvidia0 ] || echo "An index that has PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL) saves 4 GB of it: docs/quickstart.md"; \
	fi
	@$(PYTHON) -m pip install --constraint constraints.txt --editable '.[megatron,dev,report]' \
		| grep --line-buffered -E '^ *(Downloading|Building|Installing|Successfully)'
	@touch $@  # younger than what it was made from: an environment that is up to date is left alone

quickstart: .venv
	PYTHONPATH=tests/kit $(PYTHON) scripts/quickstart.py

test: .venv
	.ci/test

test-all: test
	.ci/test rest

lint: .venv
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/lint-imports --no-cache
	$(PYTHON) -m pyright

docs:
	scripts/check docs

clean:
	rm -rf .venv .venv-* build dist megatron_balance.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
