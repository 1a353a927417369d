# The two commands of the README, and the check that CI runs first.
PYTHON ?= python3
ENGINE ?= embedded
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check install clean

install: $(VENV)/.installed

# torch first, from the CPU wheel where the machine has no GPU: with it present nothing else pulls a CUDA build.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "torch==2.13.0"
	$(BIN)/python -m pip install -q -e ".[train,docker,envs,dev]"
	touch $@

demo: install
	$(BIN)/python examples/demo.py --engine $(ENGINE)

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
