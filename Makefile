# Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lab lint setup notebooks learning bench

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
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

# the measurements that the README and the quickstart quote
learning: $(READY)
	$(BIN)/python benchmarks/learning.py

bench: $(READY)
	$(BIN)/python benchmarks/step.py
