# make demo   train two small models, draw their in-context-learning curves, generate text
# make test   everything CI checks: lint, types, tests
# make lint   lint and types only
# make docs   the documentation site, in site/
# make links  the same, and whether all links between its pages lead somewhere
# make test-transformers   the Hugging Face models, with the oldest and the newest transformers that they support
# make PYTHON=python3.12 test   another interpreter (the first time: .venv remembers it)
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint docs links test-transformers
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/sympow demo

test: lint
	$(BIN)/python -m pytest -q -n auto --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-transformers: $(INSTALLED)
	for version in '==5.17.*' '>=5.17'; do \
	  rm -rf .venv/transformers; \
	  $(BIN)/python -m pip install -q --target .venv/transformers "transformers$$version" gguf && \
	  $(BIN)/python -m pip install -q --target .venv/transformers --no-deps accelerate peft psutil bitsandbytes && \
	  PYTHONPATH=.venv/transformers $(BIN)/python -m pytest -q -n auto tests/integrations || exit 1; \
	done

docs: $(INSTALLED)
	$(BIN)/python -m mkdocs build --strict --site-dir site

links: docs
	$(BIN)/python -m pip install -q --target .venv/linkchecker linkchecker
	$(BIN)/python -m http.server 8123 --bind 127.0.0.1 --directory site >/dev/null 2>&1 & \
	  trap "kill $$!" EXIT; sleep 2; PYTHONPATH=.venv/linkchecker $(BIN)/python -m linkcheck http://127.0.0.1:8123/

$(INSTALLED): pyproject.toml constraints.txt scripts/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "sympow needs Python >= 3.11, and '$(PYTHON)' is not that: try make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) scripts/install.py .venv
	@touch $@
