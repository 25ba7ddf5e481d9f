# Targets set up what they need in .venv; PY=... uses an interpreter that is already set up instead.
PY ?= .venv/bin/python
ENV := $(if $(filter file default,$(origin PY)),.venv/.ready)
# Who tries the demo need not wait for what tests and documents, which is nearly half of the environment.
DEMO_ENV := $(if $(ENV),$(if $(wildcard $(ENV)),$(ENV),.venv/.demo))
SYSTEM_PYTHON ?= python3
OLDEST_TRITON := 3.6.0
NEWEST_TRITON := 3.9.0
INTERPRETED := not gpu and not compiles and not exhaustive
COMPILED := compiles and not gpu and not exhaustive
BY_NEWEST = and not other_gpus and not one_triton
# A worker a core, so PyTorch needs no threads of its own in any of them.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal

# Many processes import the same modules, so their bytecode is kept even where the shell asks for none.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: env demo docs page presets report test test-guard test-compiles test-all gpu-test sanitize faults lint clean
.PHONY: dist dist-test smoke-matrix peers-test hub

env: $(ENV)

.venv/.ready: EXTRAS = dev,docs
.venv/.demo: EXTRAS = cli,viz
.venv/.ready .venv/.demo: pyproject.toml constraints.txt
	@$(SYSTEM_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fused-softmax needs Python 3.11 or newer" >&2; exit 1; }
	@$(SYSTEM_PYTHON) make_env.py $(EXTRAS) $@

# Beside the figures of an H200: a CPU has torch's alone, and another GPU its own.
demo: $(DEMO_ENV)
	PYTHONPATH=src $(PY) -m fused_softmax bench --quick --force --out demo/results.json --plot demo/plot.png \
	  --beside benchmarks/results/h200_softmax.json

# The recordings that the page comes with, made anew; a test fails where they differ from what the kernels do.
presets: $(ENV)
	PYTHONPATH=src FUSED_SOFTMAX_INTERPRET=1 $(PY) -m fused_softmax.trace.presets

# Three to four minutes on two cores. One process cannot both interpret and compile kernels, so the suite runs as two.
test: $(ENV)
	PYTHONPATH=src FUSED_SOFTMAX_INTERPRET=1 $(PYTEST) -m "$(INTERPRETED) and not guard"
	PYTHONPATH=src $(PYTEST) -m "$(COMPILED) and not guard"

# What CI runs besides: the page, the instruments, PyTorch's own test samples, torch.compile, more cases of all.
test-guard: $(ENV)
	PYTHONPATH=src FUSED_SOFTMAX_INTERPRET=1 $(PYTEST) -m "$(INTERPRETED) and guard"

# By the oldest Triton supported for all GPUs, by the newest for sm_90, each beside the environment's own packages.
test-compiles: .triton-$(OLDEST_TRITON)/.ready .triton-$(NEWEST_TRITON)/.ready
	PYTHONPATH=.triton-$(OLDEST_TRITON):src $(PYTEST) -m "$(COMPILED)"
	PYTHONPATH=.triton-$(NEWEST_TRITON):src $(PYTEST) -m "$(COMPILED) $(BY_NEWEST)"

# Whole products of parameters, every edge of every ladder, every plan of every GPU: an hour and more.
test-all: $(ENV)
	PYTHONPATH=src FUSED_SOFTMAX_INTERPRET=1 $(PYTEST) -m "not gpu and not compiles"
	$(MAKE) test-compiles COMPILED="compiles and not gpu" BY_NEWEST=

.triton-%/.ready: $(ENV)
	$(PY) -m pip install --quiet --no-deps --target .triton-$* triton==$*
	@touch $@

gpu-test: $(ENV)
	PYTHONPATH=src $(PY) -m pytest -m "not compiles"

# Out of bounds and races, on a machine with a GPU and the CUDA toolkit.
sanitize: $(ENV)
	PYTHONPATH=src $(PY) tests/sanitize.py

# One-line faults put into a copy of the source: exit status 1 where the tests nearest to one do not notice it.
faults: $(ENV)
	$(PY) tests/faults.py

# Other projects' own tests on this package, from the checkouts in the folder PEERS; ONLY=quack,cce takes some of them.
peers-test: $(ENV)
	$(PY) tests/peers/run.py $(PEERS) $(if $(ONLY),--only $(ONLY))

lint: $(ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The visualizer's page, from viz/ and src/fused_softmax/trace/presets.json. Needs Node 20 or newer; commit what it makes.
page:
	cd viz && npm ci && npm run build

# The page of all committed results. It is released and not committed.
report: $(ENV)
	PYTHONPATH=src $(PY) -m fused_softmax report benchmarks/results/*.json -o benchmarks/report.html --force

# The site, in build/site. A link without a target, or a page that loads from the network, is an error.
docs: $(ENV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The wheel and the sdist, which RELEASING.md is about.
dist: $(ENV)
	rm -rf dist
	$(PY) -m build --outdir dist

# The folder that Hugging Face's `kernels` loads, in build/hub; REPOSITORY=owner/name goes into its card.
hub: $(ENV)
	rm -rf build/hub
	$(PY) hub/build.py build/hub $(REPOSITORY)

# Installs both into new environments outside the checkout, and runs the sdist's tests that read its tree, or TESTS.
dist-test: dist
	$(PY) tests/check_dist.py dist $(TESTS)

# The wheel under each Python and torch supported, as far as their interpreters are here and SECONDS reach.
smoke-matrix: dist
	$(PY) tests/smoke_matrix.py dist $(if $(SECONDS),--seconds $(SECONDS))

clean:
	rm -rf .venv .triton-* .smoke build dist demo peers.json benchmarks/report.html viz/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
