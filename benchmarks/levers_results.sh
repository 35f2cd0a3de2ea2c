#!/usr/bin/env bash
# Tries levers that have a meaning on GPUs, one at a time, in small trainings under DDP and FSDP2, and prints whether each
# was applied, and what ran differently: about 3 minutes on two GPUs.
#   benchmarks/levers_results.sh OUT [RANKS [NAME ...]]     only the sweeps of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 ranks=${2:-2} only=" ${*:3} "
limit_s=${LIMIT_S:-130} always=(workload=job job.ranks="$ranks" job.skip_steps=4 job.steps=5 job.profile_steps=2)
source benchmarks/recorded_sweeps.sh

# KIND LEVERS...: one point without levers, and one for each.
levers() {
  local kind=$1 name=$1 listed
  shift
  listed=$(printf ',{%s}' "$@")
  sweep "$name" job.command="torchrun --standalone --nproc-per-node={ranks} tests/levers/training.py $kind 2048" \
    "+job.levers={}$listed"
}

levers fsdp2 nccl:{max_ctas:2} cuda:{max_connections:1} group:{max_ctas:"'default_pg:4'"} group:{high_priority:true} \
  fsdp2:{prefetch:2} fsdp2:{reshard_after_forward:false} fsdp2:{separate_reduce_scatter_group:true} \
  fsdp2:{symmetric_memory:true} host:{compile_blocks:true}
levers ddp nccl:{cta_policy:1} nccl:{min_ctas:32} ddp:{bucket_cap_mb:100} ddp:{compress_bf16:true} optimizer:{fused:true} \
  'loader:{num_workers:2,pin_memory:true},host:{non_blocking:true}'
python3 -m benchmarks.levers_table "$out"
