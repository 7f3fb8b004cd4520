# `make train` installs what training needs, the other targets all features and development tools:
# with the versions of constraints.txt, in .venv. pip does not compile to bytecode, which takes long;
# Python compiles what it imports.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --no-compile --constraint constraints.txt
BENCHMARKS := iterators asynchronous large_items sampling multi_agent policy train_ppo train_dqn \
	replay train_sac composition learning checkpoint
unexport PYTHONDONTWRITEBYTECODE
.PHONY: train test slow lint bench clean

.venv/installed-train: pyproject.toml constraints.txt
	@echo "== 1 of 3: create the virtual environment .venv (about 5 s)"
	$(PYTHON) -m venv .venv
	@echo "== 2 of 3: install PyTorch (a 190 MB wheel without CUDA, 750 MB on disk; about 20 s)"
	$(INSTALL) torch
	@echo "== 3 of 3: install flowrl, Ray, and 35 small packages (100 MB of wheels, 310 MB on disk; about 20 s)"
	$(INSTALL) --editable .
	@touch $@

.venv/installed-test: .venv/installed-train
	@echo "== install all features and development tools (…)"
	$(INSTALL) --editable '.[all,dev]'
	@touch $@

train: .venv/installed-train
	@echo "== train PPO on CartPole-v1 until its mean return is 475 (about 10 s)"
	$(BIN)/flowrl train ppo

test: .venv/installed-test
	@echo "== run the quick tests (about 5 minutes on 2 cores)"
	$(BIN)/pytest

slow: .venv/installed-test
	$(BIN)/pytest -m slow

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-test
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf .venv
