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

# torch first, by itself: no other package can bring a newer one then. Triton, whose interpreter runs the kernels, comes
# before the rest: 3.6 is the release the Hopper kernel compiles with, and it stays unless this build of torch asks for another.
$(READY): pyproject.toml requirements-cpu.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -qq --no-compile --constraint requirements-cpu.txt torch
	$(PY) -m pip install -qq --no-compile --no-deps 'triton==3.6.0; sys_platform == "linux"'
	$(PY) -m pip install -qq --no-compile --constraint requirements-cpu.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
