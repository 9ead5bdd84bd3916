# make demo    what dash computes, how exactly, how repeatably, how fast (with a Hopper GPU)
# make test    the whole test suite; on a machine without a Hopper GPU its CPU part
#
# make docs    the documentation site, into build/site, with its links checked
# make wheels  wheels for every Python here from one compilation, into dist, installed and tested
#
# Each sets up all it needs in .venv and is quick the second time.
#
#   PYTHON=python3.12   the Python to start from (3.10 or newer)
#   VENV=none           use PYTHON as it is and install nothing (machines without a network)
#   BUILD=no            do not build: dash/ already holds the module
#   ARGS='-m "not slow" -k turns'   for pytest;  ARGS='…' for demo likewise
#   MAX_JOBS=2          compile jobs; a kernel file takes up to 6 GB of memory

PYTHON ?= python3
VENV ?= .venv
BUILD ?= yes
ARGS ?=

ifeq ($(VENV),none)
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  READY :=
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  READY := $(VENV)/.ready
endif
INSTALL := DASH_BUILD=no $(PY) -m pip install -qq --no-build-isolation -e
FORMATTED = $(shell git ls-files 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cpp' 'csrc/*.cu' 'tests/*.cu')

.PHONY: help demo test docs wheels build lint format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,13p

demo: build
	$(PY) -m dash demo $(ARGS)

test: build
	$(PY) -m pytest $(ARGS)

docs: build
	@$(PY) -c 'import sphinx, furo, myst_parser' 2>/dev/null || $(INSTALL) '.[docs]'
	$(PY) -m sphinx -q -W --keep-going -b html docs build/site
	$(PY) docs/check_links.py build/site

wheels: $(READY)
	@$(PY) -c 'import uv, auditwheel' 2>/dev/null || $(INSTALL) '.[wheels]'
	$(PY) cmake/wheels.py $(ARGS)

build: $(READY)
ifeq ($(BUILD),yes)
	@$(PY) cmake/build.py
endif

$(VENV)/.ready: pyproject.toml setup.py cmake/requirements.py cmake/environment.sh \
    .pre-commit-config.yaml
	@sh cmake/environment.sh '$(PYTHON)' '$(VENV)'
	@touch $@

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED) && echo 'clang-format: all C++ files formatted'

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(FORMATTED)

clean:
	rm -rf build dist .venv *.egg-info .pytest_cache .hypothesis .ruff_cache
	rm -f dash/_C*.so dash/_C*.ptxas.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
