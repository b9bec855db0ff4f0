# Two commands do everything on a fresh machine: `make reproduce-table2` and `make test`.
# The first of them makes a virtual environment in .venv and installs requirements.txt; nothing is installed again
# unless the requirements change. To use an environment of your own: make test PY=python3

PAPER   ?= oblique_topology
SCALE   ?= demo
SEEDS   ?= 1
DATA    ?=
ROWS    ?=
SET     ?=
OUTPUT  ?= outputs
RESULTS ?=
PYTHON  ?= python3
VENV    ?= .venv

ifdef PY
RUN_READY :=
DEV_READY :=
else
PY        := $(VENV)/bin/python
RUN_READY := $(VENV)/.installed-run
DEV_READY := $(VENV)/.installed-dev
endif

export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false
# threads that wait by spinning take many times as long when another program has one of two cores
export OMP_WAIT_POLICY ?= PASSIVE

REPRODUCE = $(PY) scripts/reproduce.py $(PAPER)
OPTIONS   = --scale $(SCALE) --seeds $(SEEDS) --output "$(OUTPUT)" \
            $(if $(DATA),--data "$(DATA)") $(if $(ROWS),--rows "$(ROWS)") $(if $(RESULTS),--results "$(RESULTS)") $(SET)

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-gpu lint format benchmark report reproduce reproduce-all scenes clean

help: ## this list
	@echo "make reproduce-table2        train and evaluate what the table needs, print ours beside the paper's"
	@echo "make reproduce-tableN        PAPER=$(PAPER) SCALE=smoke|demo|photos|paper DATA=<folder> SEEDS=<how many>"
	@echo "                             ROWS=\"<config> <config> ...\" for some rows of a table only"
	@echo "                             SET=\"section.key=value ...\" OUTPUT=<folder> RESULTS=<folder>; also reproduce-figureN"
	@grep -E '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */make \1|/' \
	    | awk -F'|' '{printf "%-28s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; give another one with PYTHON=...")'
	@echo "making a virtual environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); exit 1)

$(VENV)/.installed-run: requirements.txt | $(VENV)/bin/python
	@echo "installing requirements.txt into $(VENV) (about 6 GB with the ordinary torch builds, a few minutes) ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed-run
	@echo "installing requirements-dev.txt into $(VENV) ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

install: $(RUN_READY) ## virtual environment and requirements
	@:

test: $(DEV_READY) ## all tests that need neither GPU nor half a minute each
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not slow and not gpu"

test-slow: $(DEV_READY) ## the slow tests
	$(PY) -m pytest -m "slow and not gpu"

test-gpu: $(DEV_READY) ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu

lint: $(DEV_READY) ## ruff, format and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(DEV_READY) ## ruff, rewriting files
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

benchmark: $(DEV_READY) ## performance as ratios against the alternative a user would pick
	$(PY) scripts/benchmark.py $(if $(RESULTS),--output "$(RESULTS)/benchmark")

scenes: $(RUN_READY) ## contact sheets of the embedded data set, and the ceiling of its captions
	$(PY) scripts/draw_scenes.py
	$(PY) scripts/draw_scenes.py --ceiling

report: $(RUN_READY) ## one page of everything that was reproduced
	$(PY) -m common.report.page --results results "$(OUTPUT)/results" --output "$(OUTPUT)/report.html"

# what does not exist is said before anything is installed
reproduce-%:
	@$(PYTHON) scripts/parts.py $(PAPER) $*
	@$(MAKE) --no-print-directory install
	@$(REPRODUCE) $* $(OPTIONS)

reproduce: $(RUN_READY) ## every table and figure of PAPER
	@$(REPRODUCE) all $(OPTIONS)

reproduce-all: $(RUN_READY) ## every table and figure of every paper
	@$(PY) scripts/reproduce.py all all $(OPTIONS)

clean: ## removes runs, tables and page from outputs/; committed results and .venv stay
	rm -rf "$(OUTPUT)/runs" "$(OUTPUT)/results" "$(OUTPUT)/shard_index" "$(OUTPUT)/report.html"
