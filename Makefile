# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set up .venv themselves and need no GPU.

PYTHON ?= python3
WORKERS ?= 2
PY := .venv/bin/python
READY := .venv/ready

# A rank or a test worker is one thread: several of them share the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test clean

demo: $(READY)
	$(PY) -m torch.distributed.run --nproc-per-node 2 examples/demo.py

test: $(READY)
	$(PY) -m pytest -n $(WORKERS)

# torch first, by itself: a pin cannot be overridden then by another package's wish for a newer one.
$(READY): pyproject.toml requirements-cpu.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint requirements-cpu.txt torch
	$(PY) -m pip install --quiet --constraint requirements-cpu.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
