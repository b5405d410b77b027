# Every target sets up what it needs: a virtual environment in .venv, torch, the compiled extension.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode files, each process compiles torch's modules again: half of the time of an import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint docs pages bench wheel wheel-pure wheel-check wheel-try kernels-aarch64 wheel-aarch64 wheel-try-aarch64 transformers-suite clean setup
setup: .stamps/deps .stamps/build

# One core installs what the project needs while the other compiles.
MAKEFLAGS += --jobs=2

# What building takes; seqeval, which comes as source alone, asks for setuptools-scm.
.stamps/venv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile "$(TORCH)" numpy "setuptools>=64" setuptools-scm wheel ninja
	@mkdir -p .stamps && touch $@

# What the project needs, from pyproject.toml alone.
.stamps/deps: .stamps/venv pyproject.toml
	FASTENC_BUILD=0 $(BIN)/pip install -q --no-compile --no-build-isolation -e ".[dev]" "$(TORCH)"
	@touch $@

.stamps/build: .stamps/venv setup.py $(wildcard csrc/*.* csrc/*/*.*)
	@mkdir -p build && $(BIN)/python setup.py -q build_ext --inplace > build/build.log 2>&1 || (cat build/build.log; false)
	@touch $@

demo: setup
	$(BIN)/python -m fastenc.demo

# Two processes of one thread each; what runs several threads sets their number itself.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Also compiles every variant of every Triton kernel ahead of time for every architecture.
test-all: setup
	FASTENC_ALL_KERNELS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# transformers' own tests of a model, which only its sdist has, on patched models of every family.
SDIST := build/transformers-suite
transformers-suite: setup
	$(BIN)/pip install -q parameterized
	set -e; version=$$($(BIN)/python -c "import transformers; print(transformers.__version__)"); \
	$(BIN)/pip download -q --no-deps --no-build-isolation --no-binary :all: -d $(SDIST) transformers==$$version; \
	tar xzf $(SDIST)/transformers-$$version.tar.gz -C $(SDIST); \
	OMP_NUM_THREADS=1 FASTENC_TRANSFORMERS_SDIST=$(SDIST)/transformers-$$version \
		$(BIN)/python -m pytest -n 2 --dist worksteal tests/transformers_suite

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# What the pages take from the package: the reference, the tables of warnings and of defaults.
pages: setup
	$(BIN)/python -W ignore docs/hooks/pages.py

# The site is in build/site; a warning, such as a link to nothing, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/python -m benchmarks.run

# The steps of a release, which .github/workflows/release.yml runs on other machines too. PYTHONS: those with a wheel;
# pyenv's command of a version runs only where the version is named.
PYTHONS ?= $(foreach minor,10 11 12 13 14,$(shell PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd: -) \
	python3.$(minor) -c 'import sys; print(sys.executable)' 2>/dev/null))
wheel: setup
	rm -rf dist
	$(BIN)/python -m build --sdist --no-isolation --outdir dist
	PIP_DISABLE_PIP_VERSION_CHECK=1 release/build.sh $(PYTHONS)

# The source distribution, and from it the wheel without compiled code.
wheel-pure:
	$(PYTHON) -m venv build/release/pure
	build/release/pure/bin/pip install -q build "setuptools>=64" wheel
	FASTENC_BUILD=0 build/release/pure/bin/python -m build --no-isolation --outdir dist

wheel-check:
	PYTHON=$(PYTHON) release/check.sh

# The kernels for AArch64, cross-compiled and run under qemu, without torch.
kernels-aarch64:
	release/kernels_aarch64.sh

# The wheels for AArch64, cross-compiled.
wheel-aarch64: setup
	MACHINE=aarch64 release/build.sh $(PYTHONS)

# The wheel for AArch64 under qemu, beside torch's: every op's error, and the tests in OPS.
wheel-try-aarch64:
	TORCH="$(TORCH)" release/try_aarch64.sh $(PYTHON) $(OPS)

# In a new environment, without a compiler, the wheel of each Python: QUICK=1 without the demo.
wheel-try:
	set -e; for python in $(PYTHONS); do TORCH="$(TORCH)" release/try.sh $$python; done

clean:
	rm -rf build dist .stamps $(VENV) python/fastenc/*.so python/*.egg-info
