# Each verb makes its own virtual environment in .venv from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: train test slow lint bench clean

$(BIN)/flowrl: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

train: $(BIN)/flowrl
	$(BIN)/flowrl train ppo

test: $(BIN)/flowrl
	$(BIN)/pytest

slow: $(BIN)/flowrl
	$(BIN)/pytest -m slow

lint: $(BIN)/flowrl
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BIN)/flowrl
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/multi_agent.py
	$(BIN)/python benchmarks/policy.py
	$(BIN)/python benchmarks/train_ppo.py
	$(BIN)/python benchmarks/iterators.py
	$(BIN)/python benchmarks/asynchronous.py

clean:
	rm -rf .venv
