# What is checked beside the tests. `make` alone lists the targets.
PYTHON ?= .venv/bin/python

.PHONY: help check format test pictures
help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

check: ## format, lint, types, import contracts
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

format: ## rewrite what the formatter and the linter can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test: ## the whole suite
	$(PYTHON) -m pytest -n 2 --dist loadfile

pictures: ## make the pictures of docs/ again
	$(PYTHON) -m docs.pictures
