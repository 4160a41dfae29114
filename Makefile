# Every target does its own set-up: virtual environment, packages, mosquitto, models.
# Needs Python 3.11 or newer with venv; installs mosquitto, ffmpeg and arecord through apt when they are missing and we may.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXPORT := build/export
BUNDLES := build/bundles
MODELS := pp-ocr-det silero-vad support-intent
BOARD := device-configs/generic-x86.toml

# Recipes whose model is exported use these exporters where `make test-export` has installed them.
ifneq ($(wildcard $(EXPORT)/.installed),)
export EDGEINFER_EXPORT_PYTHON ?= $(CURDIR)/$(EXPORT)/bin/python
endif

.PHONY: help demo test test-export test-fast test-openvino lint format bench bench-tools bench-show bundles wheel setup clean
.DELETE_ON_ERROR:

help:  ## show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*?## "} {printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml
	@sh tools/setup/venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

setup: $(VENV)/.installed  ## make the virtual environment, install mosquitto, ffmpeg and arecord if missing
	@sh tools/setup/mosquitto.sh
	@sh tools/setup/ffmpeg.sh

bundles: $(VENV)/.installed $(MODELS:%=$(BUNDLES)/%/manifest.json)  ## build the bundles of models/ (2-3 minutes)

wheel: $(VENV)/.installed  ## what a device installs, in dist/
	@rm -rf build/lib build/bdist.*  # modules that were removed since would be packed too
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

.SECONDEXPANSION:
$(BUNDLES)/%/manifest.json: $$(wildcard models/%/*.toml models/%/*.py) tools/edgeinfer_tools/pack.py edgeinfer/artifact/manifest.py | $(VENV)/.installed
	@set -- $(MODELS); n=1; while [ "$$1" != $* ]; do shift; n=$$((n + 1)); done; echo "[$$n/$(words $(MODELS))] $*" >&2
	$(BIN)/edgeinfer-tools build models/$* --board $(BOARD) -o $(BUNDLES)/$* --replace

demo: setup bundles  ## the whole main job, live, in under two minutes (the first time it also builds the bundles)
	$(BIN)/python -m edgeinfer_demo --bundles $(BUNDLES) --out build/demo

test: setup bundles  ## all tests
	$(BIN)/pytest $(PYTEST_ARGS)

$(EXPORT)/.installed: pyproject.toml tools/setup/export.sh
	@sh tools/setup/export.sh "$(PYTHON)" "$(EXPORT)"
	@touch $@

test-export: $(EXPORT)/.installed  ## the tests that export from PyTorch and Hugging Face; installs torch (1.6 GB) into build/export
	$(EXPORT)/bin/python -m pytest tests/export $(PYTEST_ARGS)

test-fast: $(VENV)/.installed  ## the tests that start no process and take under a quarter of a second
	$(BIN)/pytest -m "not slow and not system" $(PYTEST_ARGS)

test-openvino: setup bundles  ## the tests of the OpenVINO plug-in, which they install (53 MB), and what it gains here
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[openvino]'
	$(BIN)/pytest -rA tests/worker/test_providers.py tests/execution/test_providers.py tests/tools/test_providers.py tests/system/test_accelerator.py $(PYTEST_ARGS)

lint: $(VENV)/.installed  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for recipe in models/*/; do $(BIN)/mypy "$$recipe" || exit 1; done  # apart: their modules share names

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup bundles  ## benchmarks: tables, and build/bench/NAME.json
	$(BIN)/python -m edgeinfer_bench run --bundles $(BUNDLES) --out build/bench

bench-tools: $(VENV)/.installed $(EXPORT)/.installed  ## the toolchain beside other quantizers, every recipe (15 minutes; installs torch, 1.6 GB, and NNCF, 1 GB)
	PYTHONPATH=.:tools $(BIN)/python -m edgeinfer_bench.toolchain --out build/bench

bench-show: $(VENV)/.installed  ## print every figure measured so far, with goal and verdict
	$(BIN)/python -m edgeinfer_bench show --out build/bench

clean:  ## forget everything that was built
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache
