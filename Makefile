# Every target first creates a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
BENCHMARKS := iterators asynchronous large_items sampling multi_agent policy train_ppo train_dqn \
	replay train_sac composition learning checkpoint
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
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf .venv
