# Everything a contributor runs. Each target sets up what it needs; `make clean` removes it again.

PYTHON ?= python3
# Of `make demo`: jax (the smallest install), torch or tensorflow.
BACKEND ?= jax

# Of `make test-gpu`.
GPU_PACKAGES ?= 'jax[cuda12]' torch 'tensorflow[and-cuda]'

PIP = -m pip --disable-pip-version-check --quiet install -c constraints.txt
# By a path: a script beside the checkout would take the folder `kdist` itself for the package.
EDITABLE = --config-settings editable_mode=compat -e

PACKAGES_jax = jax
PACKAGES_torch = torch
PACKAGES_tensorflow = tensorflow-cpu

.PHONY: demo test pytest rest test-full test-gpu test-nightly matrix dist test-dist mutants keras-tests lint docs bench table clean

demo: .venv-demo-$(BACKEND)/ready
	KERAS_BACKEND=$(BACKEND) .venv-demo-$(BACKEND)/bin/kdist demo

.venv-demo-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo-$*
	.venv-demo-$*/bin/python $(PIP) $(EDITABLE) '.[demo]' $(PACKAGES_$*)
	touch $@

# One test more at a time than there are cores: most wait for worker processes for a while, which share them.
PYTEST = -m pytest -n 3 --dist loadgroup --no-loadscope-reorder --durations 20

# What CI runs: pairs instead of products. The linters run beside the tests.
test: .venv/ready
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: .venv/ready
	.venv/bin/python $(PYTEST)

# Every product, and the contract with the coming Keras.
test-full: .venv/ready lint test-nightly
	.venv/bin/python $(PYTEST) --full

# What `make test` leaves out, a part of some twelve minutes: the part that waited longest. make rest SHARDS="--count 3"
rest: .venv/ready
	.venv/bin/python -m tests.rest $(SHARDS)

# On a machine with GPUs: one command, and the file to send back. All of it takes an hour at most, and less with one GPU.
test-gpu: .venv-gpu/ready
	.venv-gpu/bin/python -m pytest tests/gpus -m gpu -p no:cacheprovider --gpu-report gpu-report.md

# PyTorch's own package brings CUDA. A package that does not fit this machine's driver: make test-gpu GPU_PACKAGES=…
.venv-gpu/ready: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip --disable-pip-version-check --quiet install $(EDITABLE) '.[servers]' $(GPU_PACKAGES) \
	  pytest pytest-timeout pytest-xdist hypothesis
	touch $@

test-nightly: .venv/ready
	.venv/bin/nox --session contract-coming-Keras -- --full

# The contract in pairs with the oldest and the newest of what kdist is supported with: docs/versions.md.
matrix: .venv/ready
	.venv/bin/nox
	.venv/bin/python -m tests.pages

# The wheel and the sdist, built in an environment of their own.
dist: .venv/ready
	rm -rf dist
	.venv/bin/python -m build --outdir dist

# The demo, and the launcher's tests, with the wheel: in a new environment, and without the checkout.
test-dist: dist
	rm -rf .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP) "$$(ls dist/*.whl)[jax,demo,ray]" \
	  pytest pytest-timeout pytest-xdist hypothesis kubernetes-validate
	.venv-dist/bin/python tests/release/outside.py jax

# Each mutant breaks one guarantee, and a test that names it must fail: make mutants MUTANTS=restore
mutants: .venv/ready
	.venv/bin/python -m tests.mutants.run $(MUTANTS)

# Keras's own tests, plainly and in a scope: make keras-tests KERAS_REPO=path of its repository at v3.15.1
keras-tests: .venv/ready
	.venv/bin/python -m tests.keras_suite.run $(KERAS_REPO)

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -q -p no:cacheprovider tests/docs/words_test.py

docs: .venv/ready
	.venv/bin/mkdocs build --strict

bench: .venv/ready
	for backend in jax torch tensorflow; do .venv/bin/python benchmarks/step_time.py $$backend || exit 1; .venv/bin/python benchmarks/input_speed.py $$backend || exit 1; .venv/bin/python benchmarks/loop_time.py $$backend || exit 1; .venv/bin/kdist bench --collectives --backend $$backend -n 2 || exit 1; .venv/bin/python benchmarks/checkpoint_speed.py $$backend || exit 1; .venv/bin/python benchmarks/parameter_servers.py $$backend steps transfers rows || exit 1; done
	.venv/bin/python benchmarks/sharded_memory.py jax
	.venv/bin/python benchmarks/control_plane.py
	for backend in jax torch tensorflow; do .venv/bin/python benchmarks/over_loops.py $$backend || exit 1; done
	for backend in jax torch tensorflow; do .venv/bin/python benchmarks/over_keras.py $$backend || exit 1; done

# Runs the contract and what each strategy can do, and writes the results into two pages.
table: .venv/ready
	.venv/bin/python $(PYTEST) --full --no-forks tests/support_multi_process_test.py -k capabilities --support-results docs/support.json
	.venv/bin/python -m tests.contract.support docs/support.json docs/support.md
	.venv/bin/python $(PYTEST) --full --no-forks tests/contract_multi_process_test.py --contract-results docs/contract.json
	.venv/bin/python -m tests.contract.table docs/contract.json docs/contract.md

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) $(EDITABLE) '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-gpu .venv-demo-* .venv-dist .nox build dist *.egg-info site .pytest_cache .ruff_cache .mypy_cache .hypothesis
