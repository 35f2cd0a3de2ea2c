#!/usr/bin/env bash
# The runs behind docs/results/*-fsdp-*.md, each with its log and its analysis in OUT, the most wanted first.
#   benchmarks/fsdp_results.sh OUT [RANKS [NAME ...]]     only the runs of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 ranks=${2:-8} only=" ${*:3} "
limit_s=290 always=(profile=none)
source benchmarks/recorded_sweeps.sh

# Layers of Llama-3 8B's sizes, which take a GPU longer than the host takes to enqueue them.
layers=(workload=fsdp model=llama3_8b ranking.num_layers=4 distributed.dp_size="$ranks" training.batch_size=32)
short=(training.max_steps=6 workload.repeats=5 workload.steps=2)

sweep grid "${layers[@]}" "${short[@]}" fsdp.forward_prefetch=false,1,2 training.gradient_accumulation=1,2,4 training.mixed_precision=bf16,fp16
sweep grid_fp32 "${layers[@]}" "${short[@]}" workload.steps=1 fsdp.forward_prefetch=false,1,2 training.gradient_accumulation=1,2 training.mixed_precision=none
sweep search_fsdp2 +experiment=fsdp_overlap "${layers[@]:1}" search.max_minutes=4
sweep search_ddp +experiment=fsdp_overlap "${layers[@]:1}" distributed.strategy=ddp search.max_minutes=3
sweep connections "${layers[@]}" distributed.strategy=fsdp2,ddp runtime.max_connections=1,8
sweep own_group "${layers[@]}" training.gradient_accumulation=1,4 fsdp.separate_reduce_scatter_group=false,true
sweep symmetric "${layers[@]}" fsdp.symmetric_memory=null,kernels,copy_engines
sweep compiled "${layers[@]}" compile.enabled=false,true training.batch_size=8,32
sweep copies workload=copy_engine copy_engine.matrix_size=4096,8192 copy_engine.copy_mb=64,256 \
  copy_engine.direction=device_to_device,peer,host_to_device,device_to_host
