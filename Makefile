# make demo and make test are complete on a fresh machine with Python 3.11 or later: they make .venv
# and install what they need; a second run is quick.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
INSTALLED_DOCS := .venv/installed-docs
INSTALLED_MUTATION := .venv/installed-mutation
INSTALLED_NETS := .venv/installed-nets
PIP_INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt
SMOKE ?=
ALL ?=
ONLINE ?=
FIGURES ?=

.PHONY: help demo test test-all test-nets test-versions mutation lint docs bench bench-scaling convergence league figures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## posteriors beside NUTS, and handwritten digits; ALL=1 for every guide, SMOKE=1 for a few steps
	$(BIN)/python examples/demo.py $(if $(SMOKE),--smoke) $(if $(ALL),--all)

test: $(INSTALLED) ## the fast tests; PYTEST="--slow-sample" adds a sample of the slow ones
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal $(PYTEST)

test-all: ## every test
	$(MAKE) test PYTEST="--slow"

test-nets: $(INSTALLED_NETS) ## unmodified nets of transformers, peft, timm and others; NETS=sample for a few
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 tests/any_net --nets $(or $(NETS),all) $(PYTEST)

test-versions: $(INSTALLED) ## the tests with the oldest and the newest dependencies; NOX="--session oldest -- --co"
	$(BIN)/nox $(or $(NOX),--session oldest newest)

mutation: $(INSTALLED_MUTATION) ## whether a test sees a change in the code; MUTATION="--mutants 40 --only maps"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation.run $(MUTATION)

lint: $(INSTALLED) ## style, docstrings, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell .

docs: export ONLINE := $(ONLINE)
docs: $(INSTALLED_DOCS) ## the site, in docs/_build/html; ONLINE=1 links types of torch, Pyro and others
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

# glibc gives back every tensor above 32 MB, and gets it again page by page; here it keeps them, and asks
# for large pages.
bench bench-scaling: export MALLOC_MMAP_THRESHOLD_ = 4000000000
bench bench-scaling: export MALLOC_TRIM_THRESHOLD_ = 16000000000
bench bench-scaling: export MALLOC_TOP_PAD_ = 500000000
bench bench-scaling: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
bench: $(INSTALLED) ## cost of steps and predictions beside the deterministic net's; BENCH="--net wide --compiled"
	$(BIN)/python -m benchmarks.bench $(BENCH)

bench-scaling: $(INSTALLED) ## how the cost of a layer grows with its sizes
	$(BIN)/python -m benchmarks.scaling $(BENCH)

convergence: $(INSTALLED) ## the ELBO against steps, by recipes of training; BENCH="--guide rowwise --data FILE.npz"
	$(BIN)/python -m benchmarks.convergence $(BENCH)

league: $(INSTALLED) ## distances of posteriors to that of NUTS, and their cost; BENCH="--problem moons --data FILE.npz"
	$(BIN)/python -m benchmarks.league $(BENCH)

# Tables and pictures of results first, which take seconds; then those that train and sample.
figures: $(INSTALLED) ## every picture and generated table of README and docs; FIGURES=results without training
	$(BIN)/python -m benchmarks.tables > /dev/null
	$(BIN)/python -m benchmarks.summary > /dev/null
	$(BIN)/python -m benchmarks.league --problem none --output benchmarks/results/league.csv --figure docs/evidence/league.svg > /dev/null
	$(BIN)/python -m benchmarks.scaling --drawn-from benchmarks/results/scaling.json --figure docs/evidence/scaling.svg
	$(BIN)/python -m benchmarks.figures --costs docs/evidence/costs.svg --convergence docs/evidence/convergence.svg --active docs/gallery/active_learning.svg > /dev/null
	$(BIN)/python docs/scripts/gallery_figures.py --page digits --page lora
ifneq ($(FIGURES),results)
	$(BIN)/python docs/scripts/bands.py
	$(BIN)/python docs/scripts/guide_pictures.py
	$(BIN)/python docs/scripts/is_it_any_good.py
	$(BIN)/python docs/scripts/gradient_variance.py
	$(BIN)/python docs/scripts/gallery_figures.py
endif

clean: ## remove .venv and everything built
	rm -rf .venv .nox build dist demo_output docs/_build docs/api/generated .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv; the first time this takes a few minutes."
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(PIP_INSTALL) --editable ".[docs]"
	touch $@

$(INSTALLED_MUTATION): $(INSTALLED)
	$(PIP_INSTALL) --editable ".[mutation]"
	touch $@

$(INSTALLED_NETS): $(INSTALLED)
	$(PIP_INSTALL) --editable ".[nets]"
	touch $@
