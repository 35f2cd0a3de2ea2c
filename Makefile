# Everything runs in .venv, installed from constraints.txt. PYTHON may name any Python from 3.11 to 3.13.
PYTHON ?= python3
BIN := .venv/bin
# Commands and tests start hundreds of processes, and where this is set each compiles all modules anew.
export PYTHONDONTWRITEBYTECODE =

# The files of tests with one of these markers: no others need to be imported.
marked = $(shell grep -rlwE --include='test_*.py' "mark\.($(1))" tests | sort $(2))

.PHONY: sweep tune kernels fsdp tp_training job optimize test test-long test-slurm test-whole test-gpu wheel golden docs lint clean

## The main job on this machine: the 15-point sweep, then its tables and YAML.
sweep: .venv/.installed
	$(BIN)/python launch.py -m tp_size=2,4,8 method=bulk num_sm=1,2,4,8,16 runtime.device=cpu hydra.sweep.dir=multirun/make_sweep
	$(BIN)/python analyze.py multirun/make_sweep

## The tuner on this machine, with few values of num_sm: search, proof on a whole layer, files for Megatron-LM.
tune: .venv/.installed
	$(BIN)/python launch.py -m +experiment=tp_overlap_tuner max_tp_size=2 num_sm=1,2,4 runtime.device=cpu hydra.sweep.dir=multirun/make_tune

## One GEMM with one collective, every implementation that runs on this machine.
kernels: .venv/.installed
	$(BIN)/python launch.py -m workload=kernel kernel=ag_gemm,gemm_rs,gemm_ar backend=torch,transformer_engine,symm_mem,flux m=64,256 n=1024 k=512 runtime.device=cpu hydra.sweep.dir=multirun/make_kernels
	$(BIN)/python analyze.py multirun/make_kernels

## FSDP2 on this machine: a grid, its tables, two of its runs' telemetry side by side; and GEMMs beside copies.
fsdp: .venv/.installed
	$(BIN)/python launch.py -m workload=fsdp model=ranking_tiny runtime.device=cpu fsdp.forward_prefetch=false,true training.max_steps=6 workload.repeats=5 hydra.sweep.dir=multirun/make_fsdp
	$(BIN)/python analyze.py multirun/make_fsdp
	$(BIN)/python analyze.py compare on_demand=multirun/make_fsdp/ranking_tiny_dp2_fsdp2_forward_prefetch=false_5ca984 ahead=multirun/make_fsdp/ranking_tiny_dp2_fsdp2_forward_prefetch=true_5ca984 --reference on_demand --output multirun/make_fsdp/compared --plots
	$(BIN)/python launch.py -m workload=copy_engine runtime.device=cpu copy_engine.matrix_size=512 copy_engine.copy_mb=4,16 hydra.sweep.dir=multirun/make_copies

## A small Qwen3 trained by each tensor-parallel stack that runs on this machine, with equal weights and data, and one table.
tp_training: .venv/.installed
	$(BIN)/python launch.py -m +experiment=tp_training model=qwen3_tiny runtime.device=cpu tp_size=2 dp_size=1 tp_training.seq_length=64 tp_training.num_training_steps=12 hydra.sweep.dir=multirun/make_tp_training
	$(BIN)/python analyze.py multirun/make_tp_training

## A training command as a user's own: two bucket sizes, their table, and why the communication of one of them is exposed.
job: .venv/.installed
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python launch.py -m workload=job job.command='torchrun --nproc-per-node={ranks} docs/train.py --size 512 --bucket-cap-mb {bucket}' job.ranks=2 runtime.device=cpu +job.values.bucket=25,1 hydra.sweep.dir=multirun/make_job
	$(BIN)/python analyze.py multirun/make_job
	$(BIN)/python analyze.py diagnose multirun/make_job/train.py_ranks2_bucket=25_*

## The same training optimized, in a few runs.
optimize: .venv/.installed
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m overlap_sweep optimize --runs 6 --allow rounding --levers ddp --output multirun/make_optimize runtime.device=cpu job.steps=8 job.profile_steps=2 -- torchrun --nproc-per-node=2 docs/train.py --size 512

## Everything quick, three tests at a time: many wait for processes, and two would leave two cores idle for a quarter of
## the time.
test: .venv/.installed
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slurm and not faults and not end_to_end"

## Sweeps on a real Slurm, processes killed at random, whole searches and tuner runs: minutes more. Two files at a time,
## since searches compare times, beside those with Slurm, which mostly wait; then those that compare measured times, alone.
test-long: .venv/.installed
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-slurm test-whole
	$(BIN)/python -m pytest -m quiet $(call marked,quiet)

test-slurm: .venv/.installed
	$(BIN)/python -m pytest -m "slurm and not quiet" $(call marked,slurm)

test-whole: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "(faults or end_to_end) and not (slurm or quiet)" $(call marked,faults|end_to_end)

## What needs GPUs, on a machine with two: 14 tests at a time, whose time is mostly the host's; then those that compare
## measured times, alone. The files with the longest tests, of workloads, come first.
test-gpu:
	python -m pytest -n 14 --dist loadgroup -m "gpu and not quiet" $(call marked,gpu,-r)
	python -m pytest -m "gpu and quiet" $(call marked,gpu)

## Builds the wheel, installs it into a fresh environment, and uses it from an empty folder.
wheel:
	PYTHON=$(PYTHON) .ci/wheel

## Writes tests/golden/expected, docs/columns.md, docs/options.md and the defaults in conf/ anew: all that analysis prints and writes. The diff is what a change does to users.
golden: .venv/.installed
	$(BIN)/python -m tests.golden.outputs

## The documentation's site, in site/: a link or an anchor that leads nowhere fails it.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "error: $(PYTHON) is not Python 3.11, 3.12 or 3.13; give one: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
