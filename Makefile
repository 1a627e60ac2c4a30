# Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lab lint setup notebooks study bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(READY)

# the main job: two different small models learn together, as a notebook, with its HTML report
demo: $(READY)
	$(BIN)/hacpo-kit run 00_quickstart --name demo
	@echo "Open reports/runs/demo.html in a browser."

test: $(READY) lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lab: $(READY)
	$(BIN)/jupyter lab notebooks

# run all notebooks and store them with their outputs
notebooks: $(READY)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb notebooks/exercises/*.ipynb

# the study that the README quotes: sweep, report and figures; a reduced one with GRID=reports/study/small.yaml
GRID ?= reports/study/study.yaml
JOBS ?= 2
STUDY := $(basename $(notdir $(GRID)))
PAGE := $(if $(filter study,$(STUDY)),reports/study/study.html,reports/runs/$(STUDY).html)

study: $(READY)
	$(BIN)/hacpo-kit sweep $(GRID) --out reports/runs/$(STUDY) --jobs $(JOBS) --keep-checkpoints none
	$(BIN)/hacpo-kit report reports/runs/$(STUDY) --out $(PAGE)
	$(if $(filter study,$(STUDY)),$(BIN)/python benchmarks/readme.py)

bench: $(READY)
	$(BIN)/python benchmarks/step.py
