# make tune    measure a few shapes on the best device of this machine and show the plan
# make test    everything that CI runs: tests, Triton interpreter, lint, types, layers, the wheel
# make lint    the parts of it that take seconds: ruff, mypy, import-linter
# make clean   remove what the others made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
WORKERS ?= 2
TUNE ?= --quick --budget 3m --shape 3072,1024 --shape 1024,3072

.DEFAULT_GOAL := test
.NOTPARALLEL:
.PHONY: install tune test pytest interpreter lint wheel clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	mkdir -p $(VENV)/src
	ln -sfn "$(CURDIR)" $(VENV)/src/nvfp4
	touch $@

tune: $(INSTALLED)
	$(BIN)/nvfp4 tune $(TUNE)
	$(BIN)/nvfp4 inspect

test: pytest interpreter lint wheel

pytest: $(INSTALLED)
	$(BIN)/pytest -n $(WORKERS)

# Kernels are decorated when they are imported, so the interpreter needs a process of its own; only for files that ask.
interpreter: $(INSTALLED)
	TRITON_INTERPRET=1 $(BIN)/pytest -n $(WORKERS) $$(grep -rlE 'INTERPRET|interpreting' tests/kernels --include='test_*.py')

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/src $(BIN)/mypy -p nvfp4 --exclude '(^|/)(build|tests|bench|docs|examples)/'
	MYPYPATH=$(VENV)/src $(BIN)/mypy --explicit-package-bases tests bench examples
	PYTHONPATH=$(VENV)/src $(BIN)/lint-imports

# The wheel is made from the source distribution, so nothing that lies about here gets into it. Its environment sees the
# dependencies in $(VENV), but not the editable install there: lines of a .pth file add folders without reading theirs.
# CuTe DSL's is one of those, so its folder is named as well.
WHEEL := $(VENV)/wheel
CUTLASS := nvidia_cutlass_dsl/dsl_packages
wheel: $(INSTALLED)
	rm -rf $(WHEEL) build nvfp4.egg-info
	$(BIN)/python -m build --no-isolation --outdir $(WHEEL) . > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	$(BIN)/python -m venv --without-pip $(WHEEL)/env
	$(BIN)/python -c "import sysconfig; p = sysconfig.get_path('purelib'); print(p, p + '/$(CUTLASS)', sep='\n')" \
		> "$$($(WHEEL)/env/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
	$(BIN)/pip --python $(WHEEL)/env/bin/python install --quiet --no-deps $(WHEEL)/*.whl
	cd / && "$(CURDIR)/$(WHEEL)/env/bin/python" -I "$(CURDIR)/.ci/check_wheel.py" "$(CURDIR)/$(WHEEL)/env"
	cd / && "$(CURDIR)/$(WHEEL)/env/bin/nvfp4" env

clean:
	rm -rf $(VENV) build dist nvfp4.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
