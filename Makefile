PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test check bench docs clean

demo: $(VENV)/ready
	$(BIN)/conserved demo

test: check
	$(BIN)/pytest -n auto --dist worksteal

check: $(VENV)/ready
	$(BIN)/ruff check src tests benchmarks docs_build examples
	$(BIN)/ruff format --check src tests benchmarks docs_build examples
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/ready
	$(BIN)/python docs_build/tables.py
	$(BIN)/python docs_build/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "conserved needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
