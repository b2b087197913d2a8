# make demo and make test do all the set-up on a fresh machine; a second run re-uses what has not changed.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BACKENDS ?= cpu
BACKEND ?= cpu
# One for each core, at most four: processes that share a core take a tenth more of its time.
WORKERS ?= auto
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=

# With it every process would compile the modules of torch anew, for four seconds.
unexport PYTHONDONTWRITEBYTECODE

DIST := dist
STAMPS := $(VENV)/.stamps
VENV_PYTHON := $(VENV)/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check -qq
CONSTRAINTS := requirements/constraints.txt

ALL_BACKENDS := $(notdir $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml)))
WHEELS = $(patsubst %,$(DIST)/.%.stamp,$(1))
SOURCE_FILES = $(shell find $(1) -type f -not -path '*/__pycache__/*')

.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help announcement demo serve-demo demo-parallel test test-end-to-end bench lint typecheck environment wheels clean compiler FORCE

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)  BACKENDS=\"$(BACKENDS)\" (wheels to install)"
	@echo "             BACKEND=$(BACKEND) (the one under test)  WORKERS=$(WORKERS) (processes that run tests)"
	@echo "             DEMO_ARGS  PYTEST_ARGS  BENCH_ARGS"

demo: announcement $(STAMPS)/demo $(STAMPS)/installed ## Set everything up, train the example's language model, let it write.
	$(VENV_PYTHON) examples/train_lm.py $(DEMO_ARGS)

serve-demo: $(STAMPS)/demo $(STAMPS)/installed ## Serve random requests over pools of states, and compare each with the model alone.
	OMP_NUM_THREADS=1 $(VENV_PYTHON) examples/serve.py --json $(VENV)/served.json --plot $(VENV)/served.png

demo-parallel: $(STAMPS)/demo $(STAMPS)/installed ## Train a small model in one process, then in four that share tokens, heads and parameters.
	OMP_NUM_THREADS=1 $(VENV_PYTHON) examples/train_parallel.py --json $(VENV)/one.json
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc-per-node 4 examples/train_parallel.py --cp 2 --tp 2 --fsdp --expect $(VENV)/one.json

# "torch" of torch's CPU index is 0.2 GB; that of PyPI for Linux needs CUDA's libraries, 2.7 GB in all.
announcement:
	@[ -e $(STAMPS)/torch ] || echo "Downloads $(TORCH) first: 0.2 GB if pip finds a build for CPUs," \
		"up to 2.7 GB from PyPI on Linux" \
		"(the build for CPUs: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo);" \
		"then 0.1 GB of other packages."
	@echo "Training takes minutes on a CPU, longer on a busy one; a bar shows the time that is left."

# The console script, not "python -m pytest": that would import kda_core from this folder instead of from the wheel.
# worksteal: a worker has whole files at first, so that few set a file's fixtures up twice.
# no:logging: no test reads log records, and catching those of torch's many loggers takes half a millisecond a test.
test: environment ## Set everything up, run the fast tests on BACKEND.
	$(VENV)/bin/pytest --backend=$(BACKEND) -n $(WORKERS) $(if $(filter auto,$(WORKERS)),--maxprocesses 4) --dist worksteal \
		-p no:logging $(PYTEST_ARGS)

test-end-to-end: compiler environment ## The same for tests of wheels, environments, interpreted and compiled kernels (minutes).
	$(VENV)/bin/pytest -m end_to_end $(PYTEST_ARGS)

bench: environment ## Compare the CPU backend with other libraries.
	$(VENV_PYTHON) benchmarks/training.py --device cpu $(BENCH_ARGS)
	$(VENV_PYTHON) benchmarks/inference.py --device cpu $(BENCH_ARGS)

lint: $(STAMPS)/lint ## Check style and formatting.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

typecheck: $(STAMPS)/lint $(STAMPS)/test ## Check the types of the core.
	$(VENV)/bin/mypy --follow-imports=silent kda_core/*.py kda_core/nn/*.py

# torch.compile's default backend writes C++; CXX is the variable that it reads, too.
compiler:
	@command -v $(CXX) > /dev/null || \
		{ echo "These tests compile with torch.compile and need a C++ compiler, and there is no $(CXX) here: install one" \
		"(on Debian or Ubuntu: apt-get install g++), or name one with CXX=..."; exit 1; }

environment: $(STAMPS)/test $(STAMPS)/installed ## Set up what the tests need, wheels included, and run nothing.

wheels: $(call WHEELS,core $(ALL_BACKENDS)) ## Build the wheels of the core and of every backend.
	@ls $(DIST)/*.whl

clean: ## Remove the environment, the wheels and caches (not demo-output).
	@if [ -d "$(STAMPS)" ]; then rm -rf "$(VENV)"; fi
	rm -rf $(DIST) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kda_core backends integrations benchmarks tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

# A file that holds the value of a variable and is touched only when that changes.
$(STAMPS)/%.value: FORCE
	@mkdir -p $(@D)
	@echo '$($*)' | cmp -s - $@ || echo '$($*)' > $@

$(STAMPS)/venv: $(STAMPS)/PYTHON.value
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The pinned versions need Python 3.11 or newer; name one with PYTHON=..., got $$($(PYTHON) -V 2>&1)"; exit 1; }
	@echo "environment: $(VENV)"
	@rm -rf $(VENV)/bin $(VENV)/lib $(VENV)/lib64 $(VENV)/include $(VENV)/pyvenv.cfg
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# --no-compile: few installed files are imported, and compiling all of them takes longer than the installation.
# torch comes first and alone: a plain requirement of it may fetch another build, of several gigabytes.
$(STAMPS)/torch: $(STAMPS)/venv $(STAMPS)/TORCH.value $(CONSTRAINTS)
	@echo "environment: $(TORCH)"
	@$(PIP) install --no-compile -c $(CONSTRAINTS) '$(TORCH)'
	@touch $@

$(STAMPS)/build $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/lint: $(STAMPS)/%: requirements/%.txt $(CONSTRAINTS) $(STAMPS)/torch
	@echo "environment: requirements/$*.txt"
	@$(PIP) install --no-compile -r $<
	@touch $@

$(STAMPS)/test: requirements/demo.txt requirements/build.txt

# $(1) short name, $(2) folder of its pyproject.toml, $(3) sources
define WHEEL_RULE
$(DIST)/.$(1).stamp: $(3) | $(STAMPS)/build
	@echo "wheel: kda-$(if $(filter core,$(1)),core,core-$(1))"
	@rm -f $(DIST)/kda_$(if $(filter core,$(1)),core,core_$(1))-*.whl
	@$(VENV_PYTHON) -m build --wheel --no-isolation --outdir $(DIST) $(2) > $(STAMPS)/wheel.log 2>&1 || \
		{ cat $(STAMPS)/wheel.log; exit 1; }
	@touch $$@
endef
CORE_SOURCES := pyproject.toml README.md LICENSE $(call SOURCE_FILES,kda_core)
$(eval $(call WHEEL_RULE,core,.,$(CORE_SOURCES)))
$(foreach b,$(ALL_BACKENDS),$(eval $(call WHEEL_RULE,$(b),backends/$(b),$(call SOURCE_FILES,backends/$(b)))))

# --no-deps: the dependencies are installed in their pinned versions (triton comes with the torch builds that use it).
$(STAMPS)/installed: $(STAMPS)/BACKENDS.value $(STAMPS)/demo $(call WHEELS,core $(BACKENDS))
	@echo "environment: wheels of kda-core and of its backends: $(BACKENDS)"
	@$(PIP) install --no-compile --no-deps --force-reinstall $(DIST)/kda_core-*.whl $(foreach b,$(BACKENDS),$(DIST)/kda_core_$(b)-*.whl)
	@touch $@

# The site's tools and twine need neither torch nor the wheels.
$(STAMPS)/docs $(STAMPS)/release: $(STAMPS)/%: requirements/%.txt $(CONSTRAINTS) $(STAMPS)/venv
	@echo "environment: requirements/$*.txt"
	@$(PIP) install --no-compile -r $<
	@touch $@

# Adapters for other stacks: each with the oldest and newest version of the stack, in an environment of its own.
STACKS := fla-0.6.0 transformers-5.18.0 transformers-5.24.0 kernels-0.17.2
LARGE_STACKS := torchtitan-0.3.0 vllm-0.33.0 sglang-0.5.23
STACK_OF = $(firstword $(subst -, ,$(1)))
PACKAGES_fla := flash-linear-attention triton
PACKAGES_transformers := transformers parameterized
PACKAGES_kernels := kernels transformers
PACKAGES_vllm := transformers triton
PACKAGES_sglang := transformers triton
PACKAGES_torchtitan := einops numpy triton
PINNED_fla := fla-core|flash-linear-attention
PINNED_transformers := transformers
PINNED_kernels := kernels
PINNED_vllm := vllm
PINNED_sglang := sglang
PINNED_torchtitan := torchtitan
# Installed without the packages that they require.
ALONE_vllm := -r requirements/stack-servers.txt vllm==0.33.0
ALONE_sglang := -r requirements/stack-servers.txt sglang==0.5.23
ALONE_torchtitan := -r requirements/stack-torchtitan.txt torchtitan==0.3.0
# Stacks whose source distributions bring tests of their own; requirements/stack-sources.txt has their hashes.
SOURCED := transformers
ADAPTERS := $(notdir $(patsubst %/pyproject.toml,%,$(wildcard integrations/*/pyproject.toml)))
STACK_ENVIRONMENTS := build/integrations
$(foreach a,$(ADAPTERS),$(eval $(call WHEEL_RULE,$(a),integrations/$(a),$(call SOURCE_FILES,integrations/$(a)))))

# $(1) an environment, $(2) a stack, $(3) its version: its tests, with the hash that is written down.
FETCH_SOURCE = grep '^$(2)==$(3) ' requirements/stack-sources.txt > $(1)/source.txt && \
	$(1)/bin/python -m pip download -qq --no-deps --no-binary $(2) --require-hashes -r $(1)/source.txt -d $(1)/source && \
	tar -xzf $(1)/source/$(2)-$(3).tar.gz -C $(1)/source $(2)-$(3)/tests

.PHONY: integrations-test integrations-environments fla-own-tests hub-build
.PRECIOUS: $(STACK_ENVIRONMENTS)/%/.stamp

$(STACK_ENVIRONMENTS)/%/.stamp: requirements/stack.txt requirements/stack-sources.txt $(CONSTRAINTS) $(STAMPS)/TORCH.value | $(STAMPS)/venv
	@echo "environment: $*"
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@sed -E 's/^($(PINNED_$(call STACK_OF,$*)))==.*/\1==$(lastword $(subst -, ,$*))/' $(CONSTRAINTS) > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip install -qq --no-compile -c $(@D)/constraints.txt '$(TORCH)'
	@$(@D)/bin/python -m pip install -qq --no-compile -c $(@D)/constraints.txt \
		$$(grep -v '^#' requirements/stack.txt) $(PACKAGES_$(call STACK_OF,$*))
	@$(if $(ALONE_$(call STACK_OF,$*)),$(@D)/bin/python -m pip install -qq --no-compile --no-deps \
		-c $(@D)/constraints.txt $(ALONE_$(call STACK_OF,$*)))
	@$(if $(filter $(SOURCED),$(call STACK_OF,$*)),$(call FETCH_SOURCE,$(@D),$(call STACK_OF,$*),$(lastword $(subst -, ,$*))))
	@touch $@

integrations-test: $(STACKS:%=integrations-test-%) $(LARGE_STACKS:%=integrations-test-%) ## Set each stack up in an environment of its own, run its adapter's tests.

integrations-environments: $(STACKS:%=$(STACK_ENVIRONMENTS)/%/.stamp)

integrations-wheels-%: $(STACK_ENVIRONMENTS)/%/.stamp $(call WHEELS,core cpu $(ADAPTERS))
	@$(<D)/bin/python -m pip install -qq --no-compile --no-deps --force-reinstall \
		$(DIST)/kda_core-*.whl $(DIST)/kda_core_cpu-*.whl $(patsubst %,$(DIST)/kda_core_%-*.whl,$(filter $(call STACK_OF,$*),$(ADAPTERS)))
	@$(if $(ALONE_$(call STACK_OF,$*)),,$(<D)/bin/python -m pip check)

# The console script, as for make test: the wheels are under test.
integrations-test-%: $(STACK_ENVIRONMENTS)/%/.stamp integrations-wheels-%
	$(if $(filter $(SOURCED),$(call STACK_OF,$*)),TRANSFORMERS_TESTS=$(CURDIR)/$(<D)/source/$*) \
		$(<D)/bin/pytest -m end_to_end tests/integrations/test_$(call STACK_OF,$*).py $(PYTEST_ARGS)

hub-build: environment ## Write a repository for Hugging Face's kernels library in build/hub.
	$(VENV_PYTHON) integrations/hub/build.py build/hub

FLA_SOURCE ?= https://github.com/fla-org/flash-linear-attention
FLA_COMMIT := bc3b101dcb713ddc5bd8924b66754eb68b5ccf89

# Elements of all states of a test's tokens, B * T * HV * D * D: larger tests are left out. CI sets it; with none of them
# left out a test takes up to 17 GB and all take minutes.
FLA_LARGEST ?=

# torch.device("cuda") stands in the file; the plugin sets the rest of the device. One process: see above.
fla-own-tests: integrations-wheels-fla-0.6.0 ## Fetch fla's own tests of KDA (FLA_SOURCE) and run them on kda_core.
	git init -q build/fla && git -C build/fla fetch -q --depth 1 $(FLA_SOURCE) $(FLA_COMMIT)
	git -C build/fla show FETCH_HEAD:tests/ops/test_kda.py | sed 's/"cuda"/"cpu"/' > build/fla/test_kda.py
	cd build/fla && OMP_NUM_THREADS=1 FLA_LARGEST=$(FLA_LARGEST) PYTHONPATH=$(CURDIR)/tests/integrations \
		../integrations/fla-0.6.0/bin/pytest -p fla_own -q test_kda.py

.PHONY: docs release

docs: $(STAMPS)/docs ## Build the documentation's site in build/site; warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

release: $(STAMPS)/build $(STAMPS)/release ## Build and check what a release would upload; upload nothing.
	$(VENV_PYTHON) tools/release.py --torch '$(TORCH)' $(RELEASE_ARGS)
