# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Python keeps what it compiled, whatever the shell says: without it pytest rewrites every assert again at each start.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo poc test test-all docs golden mutants lint bench clean

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The main job as it is in FLARE's simulator, five sites side by side (-t 5), then its result and a report.
demo: $(VENV)/ready
	rm -rf build/demo && mkdir -p build/demo
	cd build/demo && PATH="$(abspath $(BIN)):$$PATH" nvflare simulator ../../jobs/feddra -t 5 -w workspace
	$(BIN)/fedvlp report build/demo/runs/feddra/001

# The main job, smaller, through a server and three sites with real certificates on this machine; nothing stays running.
poc: $(VENV)/ready
	PATH="$(abspath $(BIN)):$$PATH" poc/run.sh

# Everything that is fast, and one run of real FLARE processes.
test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 -m "not slow"

# The rest too: simulator, provisioned and POC runs, several processes per site, another device.
test-all: test
	$(BIN)/python -m pytest -n 2 -m slow

# Draws the picture of the rooms and writes the page of FedDRA anew, then builds the site: open build/docs/index.html.
# A warning is an error; mkdocs does not count warnings when it is told to be quiet.
docs: $(VENV)/ready
	PYTHONPATH=tests $(BIN)/python -m support.picture
	PYTHONPATH=tests $(BIN)/python -m support.feddra_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Runs every committed preset shortly, says which figures moved, and rewrites those golden files; the commit says why.
golden: $(VENV)/ready
	$(BIN)/python tests/support/golden.py

# Changes guards, losses, metrics and aggregation one place at a time; what no test notices is a gap. Goes on where it
# stopped; MODULE="core/privacy core/codec" restricts it, WORKERS is 2, PROPOSE=1 prints survivors as accepted.toml has them.
mutants: $(VENV)/ready
	PYTHONPATH=tests $(BIN)/python -m mutants $(addprefix --module ,$(MODULE)) --workers $(or $(WORKERS),2) $(if $(PROPOSE),--propose) $(if $(ALL),--all)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	for program in orchestration aggregation ablation baselines dro_weights retrieval neighbours distortion training pipeline creamfl creamfl_latent public_scores car_mfl kills bytes server_memory encryption privacy poisoned; do $(BIN)/python benchmarks/$$program.py || exit 1; done

clean:
	rm -rf build runs $(VENV)
