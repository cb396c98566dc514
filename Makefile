# `make` alone lists the targets.
PYTHON ?= .venv/bin/python

.PHONY: help all check format test mutants pictures site
help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

all: check test ## everything that must pass before a commit is handed in

check: ## format, lint, types, import contracts
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

format: ## format, and fix what the linter can fix
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test: ## the whole suite
	$(PYTHON) -m pytest -n 4 --dist loadfile

mutants: ## do the tests notice 150 small faults in the pure code? (the better part of an hour)
	$(PYTHON) -m benchmarks.mutants

pictures: ## draw the pictures of docs/ again
	$(PYTHON) -m docs.pictures

site: ## build the site of docs/ in build/site, and follow its links (needs the extra docs)
	$(PYTHON) -m docs.site
