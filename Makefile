# Every target does its own set-up: on a fresh machine `make demo` is all you need to type.
.DEFAULT_GOAL := help
BIN := .venv/bin
SETUP := .venv/.installed
# Bytecode is written even where the machine says not to: a thousand graded runs import the same modules.
# Three workers on two cores: a worker waits for its graded runs, its servers and its clients a quarter of the time.
PYTEST := LANGUAGE=en PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q
PARALLEL := -n 3 --maxschedchunk 4
say := printf '\n\033[1m%s\033[0m\n'

$(SETUP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh

.PHONY: help setup demo test check lint docs serve committed wheel release figures notebooks gpu clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(SETUP) ## make .venv and install

demo: $(SETUP) ## a KV cache, a paged one, a scheduler: same tokens, less time, less memory, fewer steps
	@$(BIN)/minicache demo

test: $(SETUP) ## the code and the graders: a few minutes
	@$(PYTEST) $(PARALLEL) -m "not slow"

check: lint docs ## everything: lint, starters, tests, author gates, notebooks, both sites, chaos, the wheel, the demo
	@$(say) "Starters"
	@$(BIN)/minicache course starters --check
	@$(say) "Tests, author gates, notebooks, both sites"
	@# Some tests kill servers, or wait for browsers, while two others compute: a failure counts if it recurs alone.
	@MINICACHE_SITE=site $(PYTEST) $(PARALLEL) || \
		{ $(say) "Failures, again, one at a time"; MINICACHE_SITE=site $(PYTEST) -n 1 --lf --lfnf none; }
	@$(say) "Every state of three requests on three, four and five blocks"
	@for stage in paged fair chunked; do for blocks in 3 4 5; do \
		$(BIN)/minicache verify --scheduler $$stage --blocks $$blocks || exit 1; done; done
	@$(say) "Chaos: a router and three servers, alone on the machine"
	@$(PYTEST) tests/chaos.py
	@$(say) "The wheel, in an empty environment"
	@scripts/wheel.sh
	@$(say) "The demo"
	@$(BIN)/minicache demo

lint: $(SETUP) ## ruff, mypy --strict, import-linter, the vocabulary, names in texts, the catalogues
	@$(say) "Lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m scripts.prose
	@$(BIN)/python -m scripts.names
	@$(BIN)/python -m scripts.catalogues --check

docs: $(SETUP) ## build the site, both languages at once, into site/
	@$(BIN)/python -m scripts.docs site

serve: docs ## read the site on http://127.0.0.1:8000
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

committed:
	@[ -z "$$(git status --porcelain -- notebooks)" ] || \
		{ echo "notebooks/ has changes that are not committed, and the wheel would carry them: git stash -- notebooks"; exit 1; }

wheel: committed docs ## build the wheel, pages included, into dist/
	@$(BIN)/python -m hatchling build -t wheel

release: wheel ## what a release has: the wheel and the source into dist/, the site into out/
	@$(BIN)/python -m hatchling build -t sdist
	@mkdir -p out && tar -czf out/minicache-site.tar.gz site

figures: $(SETUP) ## draw every figure of the docs again
	@$(BIN)/python -m scripts.figures

notebooks: $(SETUP) ## execute the notebooks, two at a time
	@$(BIN)/python -m scripts.notebooks execute

gpu: $(SETUP) ## measure everything on this machine's NVIDIA GPU: half an hour
	@$(BIN)/python -m benchmarks.gpu

clean: ## remove what builds made; learners' work and .venv stay
	@rm -rf site dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
