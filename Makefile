# make demo   train two small models, draw their in-context-learning curves, generate text
# make test   everything CI checks: lint, types, tests
# make lint   lint and types only
# make docs   the documentation site, in site/
# make PYTHON=python3.12 test   another interpreter (the first time: .venv remembers it)
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint docs
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/sympow demo

test: lint
	$(BIN)/python -m pytest -q -n auto --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy
	-@$(BIN)/python -m benchmarks.tables --stale

docs: $(INSTALLED)
	$(BIN)/python -m mkdocs build --strict --site-dir site

$(INSTALLED): pyproject.toml constraints.txt scripts/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "sympow needs Python >= 3.11, and '$(PYTHON)' is not that: try make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) scripts/install.py .venv
	@touch $@
