PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --progress-bar off --no-compile -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Modules are compiled when they are first imported, and kept: few of those that are installed ever are.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest whole quick check bench docs constraints clean

demo: $(VENV)/core
	$(BIN)/conserved demo

# Types are checked while the tests begin: one core would wait for the other.
test: $(VENV)/ready
	$(MAKE) --no-print-directory --jobs=2 check pytest

# Modules that tests import are compiled by one process first: each worker would compile all of them for itself.
$(VENV)/compiled: $(VENV)/ready
	$(BIN)/pytest -q --collect-only >/dev/null
	touch $@

pytest: $(VENV)/compiled
	$(BIN)/pytest -q -n auto --dist worksteal

# With all cases of the tables of which `make test` takes a sample, and with long runs.
whole: $(VENV)/ready
	$(BIN)/pytest -q -n auto --dist worksteal --whole

# For the inner loop: the tests of what has changed since main, then others, until 40 s are over.
quick: $(VENV)/ready
	$(BIN)/python tests/quick.py

check: $(VENV)/ready
	$(BIN)/ruff check src papers tests benchmarks docs_build examples tools
	$(BIN)/ruff format --check src papers tests benchmarks docs_build examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config papers/pyproject.toml

docs: $(VENV)/ready
	$(BIN)/python docs_build/tables.py
	$(BIN)/python docs_build/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Part of a release: every extra must resolve from the public package index on every supported Python.
constraints:
	$(PYTHON) tools/check_constraints.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/order_test.py
	$(BIN)/python benchmarks/law_tables.py
	$(BIN)/python benchmarks/law_evaluation.py
	$(BIN)/python benchmarks/law_count.py
	$(BIN)/python benchmarks/certificates.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/energy_field.py
	$(BIN)/python benchmarks/attention_alarm.py
	$(BIN)/python benchmarks/natural_attention.py
	$(BIN)/python benchmarks/vmapped_seeds.py

# The demonstration prints, proves and writes a report; everything else is for those who change the package.
$(VENV)/core: $(VENV)/pip
	$(INSTALL) -e ".[cli,report,certify]" -e papers
	touch $@

# What is listed in constraints.txt is fetched and unpacked by several processes, most of whose time is waiting; pip then
# finds it there, resolves as always, and adds what a platform needs besides (CUDA's libraries, say).
PARTS := 0 1 2 3
$(VENV)/ready: $(VENV)/pip
	$(MAKE) --no-print-directory --jobs=5 $(VENV)/large $(PARTS:%=$(VENV)/part%)
	$(INSTALL) --no-build-isolation -e ".[dev]" -e "papers[data,ray]"
	touch $(VENV)/core $@

# Two packages are more than half of all that is installed.
$(VENV)/large: $(VENV)/pip
	$(INSTALL) --no-deps torch "triton; sys_platform == 'linux'"
	touch $@

$(VENV)/part%: $(VENV)/pip
	grep -E '^[a-zA-Z]' constraints.txt | grep -vE '^(torch|triton)==' | awk 'NR % 4 == $*' > $@.txt
	$(INSTALL) --no-deps -r $@.txt
	touch $@

# The pip that comes with Python 3.11 takes twice as long for the rest.
$(VENV)/pip: pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "conserved needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) pip
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
