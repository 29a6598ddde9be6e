# The front door. Every verb works on a fresh machine: what it needs, it installs into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev

GOOGLEAPIS = $(shell $(BIN)/python -c "import os, google.rpc as r; print(os.path.dirname(os.path.dirname(list(r.__path__)[0])))")
PROTOC   = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto -I $(GOOGLEAPIS)
ALL      := $(wildcard proto/candor/v1/*.proto)
SERVICES := $(filter-out %/inference.proto,$(ALL))

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve test lint bench proto proto-check clean

help:         ## show these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(STAMP)   ## install the services into .venv
setup-dev: $(DEV) ## the same with everything that tests and lint need

serve: $(STAMP)   ## run the whole stack with the default model on http://127.0.0.1:8000
	@$(BIN)/candor serve $(ARGS)

test: $(DEV)      ## run the whole suite: real processes, real model
	$(BIN)/candor models pull
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV)      ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV)     ## side by side with llama.cpp's own server, and the cost per streamed chunk
	$(BIN)/candor models pull
	$(BIN)/python -m bench $(ARGS)

proto: $(DEV)     ## regenerate candor/v1 from proto/
	$(PROTOC) --python_out=. --pyi_out=. $(ALL)
	$(PROTOC) --grpc_python_out=. --mypy_grpc_out=quiet:. $(SERVICES)

proto-check: proto ## the committed code is what the contract says
	git diff --exit-code -- candor/v1

clean:            ## remove what these verbs made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
