# `make train` installs what training needs, the other targets all features and development tools:
# with the versions of constraints.txt, in .venv. pip does not compile to bytecode, which takes long;
# Python compiles what it imports.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --no-compile --constraint constraints.txt
BENCHMARKS := iterators asynchronous large_items sampling multi_agent policy train_ppo train_dqn train_images \
	replay train_sac train_multi_agent composition learning checkpoint diagnosis chaos chaos_driver replayed_runs soak faults \
	monitoring train_ppo_envs overhead startup train_lstm slow_envs gpu
unexport PYTHONDONTWRITEBYTECODE
.PHONY: train announce-test test slow lint docs docs-test docs-serve bench clean

.venv/installed-train: pyproject.toml constraints.txt
	@echo "== 1 of 3: create the virtual environment .venv (about 5 s)"
	$(PYTHON) -m venv .venv
	@echo "== 2 of 3: install PyTorch (740 MB on disk without CUDA, several GB with it; about 20 s)"
	$(INSTALL) torch
	@echo "== 3 of 3: install flowrl, Ray and 34 other packages (310 MB on disk; about 20 s)"
	$(INSTALL) --editable .
	@touch $@

.venv/installed-test: .venv/installed-train
	@echo "== install all features and development tools: 136 packages (2.1 GB on disk; about 90 s)"
	$(INSTALL) --editable '.[all,dev,docs]'
	@touch $@

train: .venv/installed-train
	@echo "== train PPO on CartPole-v1 until its mean return is 475 (about 10 s)"
	$(BIN)/flowrl train ppo

announce-test:
	@[ -e .venv/installed-test ] || echo "== install 3.2 GB (about 2 minutes), then"
	@echo "== run the quick tests (4 to 7 minutes on 2 cores)"

test: announce-test .venv/installed-test
	$(BIN)/pytest

slow: .venv/installed-test
	$(BIN)/pytest -m slow

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-test
	@echo "== build the documents (about 60 s)"
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build
	@echo "== open docs/_build/index.html"

docs-test: .venv/installed-test
	$(BIN)/pytest --dist loadfile docs README.md

docs-serve: docs
	$(BIN)/python -m http.server --directory docs/_build 8000

bench: .venv/installed-test
	@echo "== all benchmarks, for several hours; benchmarks/NAME.py runs one"
	@failed=; for name in $(BENCHMARKS); do echo "== $$name"; \
		$(BIN)/python benchmarks/$$name.py || failed="$$failed $$name"; done; \
		if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

clean:
	rm -rf .venv
