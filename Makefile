# What people run and what CI runs. Each target makes what it needs, and is quick when nothing changed.
#   make serve ARGS='--port 8123'     serve the demo model (or: make serve ARGS='MODEL --port 8123')
#   make test ARGS='tests/memory -x'  the suite; minutes on two cores
#   make test-heavy                   the runs that take minutes each
#   make lint                         ruff, mypy, import-linter
#   make native                       build what changed in native/; the module lands in kvarto/core
#   make sanitize                     the tests of native code under ASan, UBSan and TSan, in build/; minutes each
#   make bench ARGS=memory          every file of benchmarks/, or those whose path has the word

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints-dev.txt
ARGS ?=

# Several test processes on few cores: threads that wait for each other by spinning take the cores away.
test test-heavy: export OMP_NUM_THREADS ?= 1

.PHONY: serve native sanitize test test-heavy lint format bench constraints clean help
help:
	@sed -n '2,8s/^# *//p' Makefile

$(BIN)/python:
	@echo '== making $(VENV) with $(shell $(PYTHON) --version)'
	@$(PYTHON) -c 'import sys; sys.exit("Kvarto needs Python 3.11 or newer; name one: make PYTHON=python3.11 …") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# What builds the native module; CMake and ninja only where the system has none.
BUILD_TOOLS := nanobind scikit-build-core $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))
# One build folder for pip and `make native`, so that neither builds what the other has built.
INSTALL := PATH="$(abspath $(BIN)):$$PATH" $(PIP_INSTALL) --no-build-isolation \
    --config-settings=build-dir=build/native --config-settings=cmake.define.KVARTO_WERROR=ON --editable

$(VENV)/.build-tools: | $(BIN)/python
	@command -v c++ g++ clang++ >/dev/null || { echo 'Kvarto needs a C++20 compiler: g++ 12 or clang 15, or newer'; exit 1; }
	$(PIP_INSTALL) $(BUILD_TOOLS)
	@touch $@

$(VENV)/.runtime-installed: pyproject.toml constraints-dev.txt $(VENV)/.build-tools
	@echo '== building Kvarto and installing it into $(VENV)'
	$(INSTALL) .
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints-dev.txt $(VENV)/.build-tools
	@echo '== building Kvarto and installing it, PyTorch and the development tools into $(VENV)'
	$(INSTALL) '.[torch,bench,k8s,dev]'
	@touch $@ $(VENV)/.runtime-installed

# Two builds at once in one folder would break each other: the second waits.
native: export PATH := $(abspath $(BIN)):$(PATH)
native: $(VENV)/.build-tools
	@mkdir -p build/native
	@test -f build/native/build.ninja || \
	    cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DKVARTO_WERROR=ON
	@flock build/native.lock cmake --build build/native

# Each sanitizer has a build and a copy of the package of its own, beside the source tree. Python itself is not
# instrumented: its allocations are no business of ours, and a sanitizer's library must be there before it.
SANITIZED_TESTS ?= tests/ops/native tests/ops/test_adapters.py tests/ops/test_narrow_adapters.py \
    tests/ops/test_coded_adapters.py tests/adapters/test_packer.py tests/adapters/test_coded_packer.py \
    tests/adapters/test_page_hasher.py tests/memory/test_page_pool.py tests/memory/test_exact_offsets.py
# Instruction sets, `;` between them, beside the portable one, which is always there. Each costs minutes to build.
cpu_has = $(shell grep -qsw $(1) /proc/cpuinfo && echo yes)
SANITIZED_ISAS ?= $(if $(call cpu_has,avx512_bf16),avx512_bf16,$(if $(call cpu_has,avx512_vnni),avx512,portable))
SANITIZERS := address undefined thread
# One after the other, one compiler at a time, so that the machine stays usable meanwhile.
sanitize:
	@for each in $(SANITIZERS); do $(MAKE) --no-print-directory sanitize-$$each || exit 1; done

sanitize-%: export PATH := $(abspath $(BIN)):$(PATH)
sanitize-%: $(VENV)/.dev-installed
	@mkdir -p build/$*/tree && cp -r kvarto tests pyproject.toml build/$*/tree && rm -f build/$*/tree/kvarto/core/*.so
	@cmake -S . -B build/$* -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DKVARTO_SANITIZE=$* \
	    -DKVARTO_ISAS='$(SANITIZED_ISAS)' -DKVARTO_MODULE_DIR=$(abspath build/$*/tree/kvarto/core) >/dev/null
	@cmake --build build/$* --parallel 1
	cd build/$*/tree && LD_PRELOAD="$(strip $(foreach library,$(SANITIZER_LIBRARIES_$*),$(shell g++ -print-file-name=$(library))))" \
	    $(SANITIZER_OPTIONS) OMP_NUM_THREADS=1 \
	    python -m pytest -q -p no:cacheprovider --capture=sys --timeout 1800 $(SANITIZED_TESTS) $(ARGS)

# Address: it takes over how exceptions are thrown, which needs the C++ library that ours come from to be there first.
# Leaks: those of the interpreter and its packages, which are never taken down. Races: only those that our own code
# takes part in; the locks of other libraries' thread pools are unseen.
SANITIZER_OPTIONS := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=report_signal_unsafe=0:ignore_noninstrumented_modules=1
SANITIZER_LIBRARIES_address := libasan.so libstdc++.so
SANITIZER_LIBRARIES_undefined := libubsan.so
SANITIZER_LIBRARIES_thread := libtsan.so

serve: $(VENV)/.runtime-installed native
	$(BIN)/kvarto serve $(ARGS)

test: $(VENV)/.dev-installed native
	$(BIN)/python -m pytest $(ARGS)

test-heavy: $(VENV)/.dev-installed native
	$(BIN)/python -m pytest -m heavy --timeout 3600 $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev-installed native
	$(BIN)/python -m benchmarks $(ARGS)

constraints: $(VENV)/.dev-installed
	@sed -n '/^#/p' constraints-dev.txt > $(VENV)/constraints
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> $(VENV)/constraints
	@mv $(VENV)/constraints constraints-dev.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
