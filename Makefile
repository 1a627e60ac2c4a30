# Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# One thread, and instructions that every processor of the last ten years has: stored outputs can be compared elsewhere.
SAME := OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell \
	NPY_DISABLE_CPU_FEATURES="AVX512F AVX512CD AVX512_SKX" HF_HUB_OFFLINE=1
# A notebook that trains goes on with its run of last time: whose outputs are stored or compared begins anew.
ANEW := HACPO_KIT_RUNS=$$(mktemp -d)
NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/exercises/*.ipynb)

.PHONY: demo test test-vllm test-ray setup-vllm lab lint audit setup notebooks study chaos bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(READY)

# the main job: two different small models learn together, as a notebook, with its HTML report
demo: $(READY)
	$(BIN)/hacpo-kit run 00_quickstart --name demo
	@echo "Open reports/runs/demo.html in a browser."

# the tests, two files at a time; then the notebooks: as they are stored, through papermill, and run with every output compared
test: $(READY) lint
	$(BIN)/python -m pytest --ignore tests/notebooks/test_notebooks.py --ignore tests/notebooks/test_exercises.py \
		-n 2 --dist loadfile --no-loadscope-reorder --durations 5
	$(SAME) $(ANEW) $(BIN)/python -m pytest $$($(SAME) $(BIN)/python tests/numerics.py) --nbval-sanitize-with tests/nbval.cfg \
		-n 2 --dist loadfile --durations 5 tests/notebooks/test_notebooks.py tests/notebooks/test_exercises.py $(NOTEBOOKS)

# the vLLM engine on a CPU, in an environment of its own: vLLM brings its own versions of much
VLLM := .venv-vllm/bin

setup-vllm: .venv-vllm/.ready

.venv-vllm/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r constraints-vllm.txt
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

test-vllm: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/vllm

# agents in Ray workers, on a local cluster, in the same environment
test-ray: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/models/test_ray.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# known vulnerabilities of the pinned versions; asks the package index about each, and fails where it has no answer
AUDIT := .venv-audit/bin

audit:
	$(PYTHON) -m venv .venv-audit
	$(AUDIT)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(AUDIT)/pip-audit --strict --no-deps --disable-pip -r constraints.txt
	$(AUDIT)/pip-audit --strict --no-deps --disable-pip -r constraints-vllm.txt

lab: $(READY)
	$(BIN)/jupyter lab notebooks

# run all notebooks and store them with their outputs
notebooks: $(READY)
	$(SAME) $(ANEW) $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False $(NOTEBOOKS)
	$(SAME) $(BIN)/python tests/numerics.py --write

# the study that the README quotes: sweep, report and figures; a reduced one with GRID=reports/study/small.yaml
GRID ?= reports/study/study.yaml
JOBS ?= 2
STUDY := $(basename $(notdir $(GRID)))
PAGE := $(if $(filter study,$(STUDY)),reports/study/study.html,reports/runs/$(STUDY).html)

study: $(READY)
	$(BIN)/hacpo-kit sweep $(GRID) --out reports/runs/$(STUDY) --jobs $(JOBS) --keep-checkpoints none
	$(BIN)/hacpo-kit report reports/runs/$(STUDY) --out $(PAGE)
	$(if $(filter study,$(STUDY)),$(BIN)/python benchmarks/readme.py)

# 50 runs are killed at random moments, then a kernel, a sweep, a verifier process and (where Ray is installed) a worker
KILLS ?= 50

chaos: $(READY)
	$(BIN)/python tests/chaos --kills $(KILLS)

bench: $(READY)
	$(BIN)/python benchmarks/step.py
