# Two commands do everything on a fresh machine: `make reproduce-table2` and `make test`.
# The first of them makes a virtual environment in .venv and installs requirements.txt; nothing is installed again
# unless the requirements change. To use your environment: make test PY=python3

SETTINGS = PAPER SCALE SEEDS PLAN NEAR SEARCHED DATA WEIGHTS ROWS RUNS SET OUTPUT RESULTS FORMATS PY PYTHON VENV

# What each target reads; another setting behind it would be dropped without a word.
READS_rows          = PAPER OUTPUT
READS_clean         = OUTPUT
READS_benchmark     = RESULTS
READS_report        = OUTPUT RESULTS
READS_seeds         = PAPER SCALE $(READS_report)
READS_compare       = RUNS SET OUTPUT
READS_map           = $(READS_compare)
READS_search        = PAPER SCALE DATA WEIGHTS ROWS SET OUTPUT RESULTS
READS_reproduce-all = SCALE SEEDS PLAN NEAR SEARCHED DATA WEIGHTS ROWS SET OUTPUT RESULTS FORMATS
READS_reproduce     = PAPER $(READS_reproduce-all)
READ_NOTHING        = install test test-slow test-gpu lint format scenes device-work

# Settings count behind `make` only: a DATA or OUTPUT that the shell happens to have must not change a result or
# what `make clean` removes. Such a one is named, and so is a setting that there is not, such as SEDS=3.
ifeq ($(MAKELEVEL),0)
IGNORED := $(strip $(foreach name,$(SETTINGS),$(if $(filter environment,$(lastword $(origin $(name)))),$(name))))
$(if $(IGNORED),$(warning $(IGNORED) from the environment: not used; settings follow make, as in: make reproduce-table2 SEEDS=3))
UNKNOWN := $(strip $(filter-out $(SETTINGS),$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))))
$(if $(UNKNOWN),$(error no setting $(UNKNOWN); expected one of: $(SETTINGS)))
READ := $(foreach goal,$(MAKECMDGOALS),$(or $(READS_$(goal)),$(if $(filter reproduce-%,$(goal)),$(READS_reproduce))))
UNREAD := $(strip $(filter-out $(READ) PY PYTHON VENV,$(foreach name,$(SETTINGS),$(if $(filter command,$(origin $(name))),$(name)))))
$(if $(and $(READ)$(filter $(READ_NOTHING),$(MAKECMDGOALS)),$(UNREAD)),$(error \
    $(UNREAD) has no effect on make $(MAKECMDGOALS); expected one of: $(READ) PY PYTHON VENV))
endif

PAPER   = oblique_topology
SCALE   = demo
SEEDS   = 1
DATA    =
WEIGHTS =
PLAN    =
NEAR    =
SEARCHED =
ROWS    =
RUNS    =
SET     =
OUTPUT  = outputs
RESULTS =
FORMATS =
PYTHON  = python3
VENV    = .venv

$(foreach name,NEAR SEARCHED,$(if $(filter-out 0 1,$(value $(name))),$(error $(name)=$(value $(name)): expected 0 or 1)))

ifeq ($(filter command,$(origin PY)),command)
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

# a setting as one word of the shell, just as it was typed: spaces, quotes and $ mean nothing here
typed     = '$(subst ','\'',$(value $1))'
option    = $(if $(value $1),--$2 $(call typed,$1))
REPRODUCE = $(PY) scripts/reproduce.py
OPTIONS   = --scale $(call typed,SCALE) --seeds $(call typed,SEEDS) --output $(call typed,OUTPUT) \
            $(call option,PLAN,plan) $(if $(filter-out 0,$(value NEAR)),--near) $(if $(filter-out 0,$(value SEARCHED)),--searched) $(call option,DATA,data) $(call option,WEIGHTS,weights) \
            $(call option,ROWS,rows) $(call option,RESULTS,results) $(call option,FORMATS,formats) $(call option,SET,set)

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-gpu lint format benchmark device-work report reproduce reproduce-all compare \
        search seeds map rows scenes clean

help: ## this list
	@echo "make reproduce-table2        train and evaluate what the table needs, print ours beside the paper's"
	@echo "make reproduce-tableN        PAPER=$(PAPER) SCALE=smoke|demo|photos|photos_scratch|paper SEEDS=<how many>"
	@echo "                             DATA=<folder of images and captions> WEIGHTS=<folder of pre-trained weights>"
	@echo "                             ROWS=\"<row> <row> ...\" for some rows of a table only, see make rows"
	@echo "                             SEARCHED=1 each row at the best setting of its search, NEAR=1 at those near the best"
	@echo "                             PLAN=<seeds in the end>"
	@echo "                             SET=\"section.key=value ...\" OUTPUT=<folder> RESULTS=<folder> FORMATS=csv,latex"
	@echo "                             also reproduce-figureN and other parts"
	@grep -E '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */make \1|/' \
	    | awk -F'|' '{printf "%-28s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; give another one with PYTHON=...")'
	@echo "making a virtual environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); exit 1)

$(VENV)/.installed-run: requirements.txt | $(VENV)/bin/python
	@echo "installing requirements.txt into $(VENV) (about 7 GB with the ordinary torch builds, 10 GB while pip installs; a few minutes) ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed-run
	@echo "installing requirements-dev.txt into $(VENV) ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(VENV)/bin/python tests/fake_cuda/fake_cuda.py
	@$(VENV)/bin/python -m tests.preloaded
	@touch $@

install: $(RUN_READY) ## virtual environment and requirements
	@:

# Bytecode is written also where the shell says not to: else each process compiles all tests again, 8 s. A process that
# crashes ends the run: a new one in its place would wait for ever for tests that the first had in hand.
test: $(DEV_READY) ## the quick tests, which need no GPU
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --max-worker-restart 0 --dist loadscope --no-loadscope-reorder \
	    -m "not slow and not gpu"

test-slow: $(DEV_READY) ## whole runs of kinds that the quick tests have, the installed wheel, a second notebook
	$(PY) -m pytest -m "slow and not gpu"

test-gpu: $(DEV_READY) ## the tests that need a CUDA device; those not yet passed (outputs/test-gpu.txt) first
	TEST_RESULTS=outputs/test-gpu.txt $(PY) -m pytest -m gpu -vv

lint: $(DEV_READY) ## ruff, format and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(DEV_READY) ## ruff, rewriting files
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# its threads wait as they do without make
benchmark: $(DEV_READY) ## performance as ratios; with a GPU its rows, in minutes; continues if interrupted
	env -u OMP_WAIT_POLICY $(PY) scripts/benchmark.py $(if $(value RESULTS),--output $(call typed,RESULTS)/benchmark)

scenes: $(RUN_READY) ## contact sheets of the embedded data set, and the ceiling of its captions
	$(PY) scripts/draw_scenes.py
	$(PY) scripts/draw_scenes.py --ceiling

device-work: $(DEV_READY) ## what a step of each row asks of a GPU, counted without one
	$(PY) scripts/device_work.py

report: $(RUN_READY) ## pages of everything that was reproduced: an index, and one for each paper
	$(PY) -m common.report.page --results results $(call typed,OUTPUT)/results $(if $(value RESULTS),$(call typed,RESULTS)) --output $(call typed,OUTPUT)/report.html

compare: $(RUN_READY) ## models side by side, with paired tests: RUNS="<run, checkpoint or evaluation.json> ..."
	@$(PY) scripts/compare.py $(call typed,RUNS) $(call option,SET,set) $(call option,OUTPUT,output)

seeds: $(RUN_READY) ## seeds that a difference of x takes, for each claim of PAPER at SCALE; prints no difference
	@$(PY) -m common.report.seeds $(call typed,PAPER) --scale $(call typed,SCALE) --results results $(call typed,OUTPUT)/results $(if $(value RESULTS),$(call typed,RESULTS))

search: $(RUN_READY) ## settings by validation numbers: ROWS="<row> <row>" SET="section.key=value,value,..."
	@$(PY) scripts/search.py $(call typed,PAPER) --rows $(call typed,ROWS) --set $(call typed,SET) \
	    --scale $(call typed,SCALE) --output $(call typed,OUTPUT) $(call option,DATA,data) \
	    $(call option,WEIGHTS,weights) $(call option,RESULTS,results)

map: $(RUN_READY) ## the embedding space of runs as one HTML page: RUNS="<run or checkpoint> ..."
	@$(PY) scripts/map.py $(call typed,RUNS) $(call option,SET,set) --output $(call typed,OUTPUT)/map.html

rows: ## the rows of PAPER: what each is, and whether it was run
	@$(PYTHON) scripts/parts.py rows $(call typed,PAPER) $(call typed,OUTPUT)

# what does not exist is said before anything is installed
reproduce-%:
	@$(PYTHON) scripts/parts.py part $(call typed,PAPER) '$*'
	@$(MAKE) --no-print-directory install
	@$(REPRODUCE) $(call typed,PAPER) $* $(OPTIONS)

reproduce: $(RUN_READY) ## every table and figure of PAPER
	@$(REPRODUCE) $(call typed,PAPER) all $(OPTIONS)

reproduce-all: $(RUN_READY) ## every table and figure of every paper
	@$(REPRODUCE) all all $(OPTIONS)

clean: ## removes runs, tables and page from outputs/; committed results and .venv stay
	$(if $(filter OUTPUT,$(IGNORED)),$(error OUTPUT comes from the environment; run: make clean OUTPUT=<folder>))
	@output=$(call typed,OUTPUT); case "$$output" in "~"|"~/"*) output=$$HOME$${output#"~"};; esac; \
	there=$$(cd -- "$${output:-/}" 2>/dev/null && pwd -P); \
	case "$$there" in /|"$$(pwd -P)"|"$${HOME:-/}") \
	    echo "error: OUTPUT=$$output: $$there is not a folder of outputs; runs/ and results/ in it stay" >&2; exit 1;; esac; \
	cd -- "$$output" 2>/dev/null || exit 0; rm -rf runs results shard_index report.html report_*.html; echo "cleaned: $$there"

.DEFAULT:
	@$(PYTHON) scripts/parts.py target '$@'
