# Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# One thread and the instruction sets of any x86 processor of the last ten years: stored outputs can be compared elsewhere.
SAME := OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell \
	NPY_DISABLE_CPU_FEATURES="AVX512F AVX512CD AVX512_SKX" HF_HUB_OFFLINE=1
# A notebook that trains resumes its last run. Where outputs are stored or compared it has to start a new one.
NEW_RUNS := HACPO_KIT_RUNS=$$(mktemp -d)
NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/exercises/*.ipynb)

.PHONY: help setup demo lab test test-all test-vllm test-ray setup-vllm docs lint audit notebooks study chaos bench
.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

setup: $(READY)  ## install everything into .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(READY)

demo: $(READY)  ## train two small models together and alone, write reports/runs/demo.html
	$(BIN)/hacpo-kit run 00_quickstart --name demo
	@echo "Open reports/runs/demo.html in a browser."

# Jupyter refuses to run as root, as in most containers, unless it is told to
ROOT_OPTION := $(if $(filter 0,$(shell id -u)),--allow-root)

lab: $(READY)  ## open the notebooks in JupyterLab
	$(if $(ROOT_OPTION),@echo "Warning: JupyterLab runs as root. Notebook code can change any file of this system; use a container or another user.")
	$(BIN)/jupyter lab $(ROOT_OPTION) notebooks

NOTEBOOK_TESTS = $(SAME) $(NEW_RUNS) $(BIN)/python -m pytest $$($(SAME) $(BIN)/python tests/numerics.py) \
	--nbval-sanitize-with tests/nbval.cfg -n 2 --dist loadfile --durations 5

test: $(READY) lint  ## the fast tests, one browser test for each widget, every notebook once
	$(BIN)/python -m pytest -m "not slow" --ignore tests/notebooks -n 2 --dist loadfile --durations 5
	$(SAME) $(BIN)/python tests/short_runs.py
	$(NOTEBOOK_TESTS) $(NOTEBOOKS)

test-all: $(READY) lint  ## all tests; every notebook with its own parameters, with others, and compared with its stored outputs
	$(BIN)/python -m pytest --ignore tests/notebooks -n 2 --dist loadfile --no-loadscope-reorder --durations 5
	$(SAME) $(BIN)/python tests/short_runs.py
	$(NOTEBOOK_TESTS) tests/notebooks $(NOTEBOOKS)

# the vLLM engine on a CPU, in an environment of its own: vLLM brings its own versions of much
VLLM := .venv-vllm/bin

setup-vllm: .venv-vllm/.ready

.venv-vllm/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r constraints-vllm.txt
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

test-vllm: setup-vllm  ## the vLLM engine on a CPU
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/vllm

# agents in Ray workers, on a local cluster, in the same environment
test-ray: setup-vllm  ## agents in Ray workers
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/models/test_ray.py
	$(SAME) $(VLLM)/python tests/short_runs.py

lint: $(READY)  ## style, format and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

AUDIT := .venv-audit/bin

audit:  ## look up known vulnerabilities of the pinned versions
	$(PYTHON) -m venv .venv-audit
	$(AUDIT)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(AUDIT)/pip-audit --strict --no-deps --disable-pip -r constraints.txt
	$(AUDIT)/pip-audit --strict --no-deps --disable-pip -r constraints-vllm.txt


notebooks: $(READY)  ## run all notebooks and store their outputs
	$(SAME) $(NEW_RUNS) $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False $(NOTEBOOKS)
	$(SAME) $(BIN)/python tests/numerics.py --write

# the study that the README quotes: sweep, report and figures; a reduced one with GRID=reports/study/small.yaml
GRID ?= reports/study/study.yaml
JOBS ?= 2
STUDY := $(basename $(notdir $(GRID)))
PAGE := $(if $(filter study,$(STUDY)),reports/study/study.html,reports/runs/$(STUDY).html)

study: $(READY)  ## all methods on all sets of agents (about an hour on two cores)
	$(BIN)/hacpo-kit sweep $(GRID) --out reports/runs/$(STUDY) --jobs $(JOBS) --keep-checkpoints none
	$(BIN)/hacpo-kit report reports/runs/$(STUDY) --out $(PAGE)
	$(if $(filter study,$(STUDY)),$(BIN)/python docs/generate.py)

# 50 runs are killed at random moments, then a kernel, a sweep, a verifier process and (where Ray is installed) a worker
KILLS ?= 50

chaos: $(READY)  ## kill runs at random moments, resume them, compare with undisturbed runs
	$(BIN)/python tests/chaos --kills $(KILLS)

bench: $(READY)  ## time one step of hacpo
	$(BIN)/python benchmarks/step.py

docs: .venv/.docs  ## build the documentation into docs/_build/html, offline
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html in a browser."

.venv/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@
