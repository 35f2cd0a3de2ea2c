#!/usr/bin/env bash
# The runs behind docs/results/*-kernels-*.md, each with its log and its analysis in OUT, the most wanted first.
#   benchmarks/kernel_results.sh OUT [TP [NAME ...]]     only the runs of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 tp=${2:-8} only=" ${*:3} "
limit_s=280 always=(workload=kernel tp_size="$tp")
source benchmarks/recorded_sweeps.sh

everyone=(backend=torch,transformer_engine,symm_mem,flux profile=none)

sweep models model=llama3_8b,llama3_70b,gpt3_175b operator=qkv,proj,fc1,fc2 "${everyone[@]}"
sweep over_m model=llama3_70b operator=fc1,fc2 m=512,1024,2048,4096,16384 "${everyone[@]}"
sweep fp8 model=llama3_70b operator=qkv,proj,fc1,fc2 dtype=float8_e4m3fn "${everyone[@]}"
sweep all_reduce model=llama3_70b operator=proj,fc2 kernel=gemm_ar m=512,2048,8192 "${everyone[@]}"
sweep reference kernel=ag_gemm,gemm_rs m=1024,8192 n=12288 k=49152 dtype=float16 iters=10 "${everyone[@]}"
sweep again model=llama3_70b operator=qkv,proj,fc1,fc2 repetition=0,1,2 "${everyone[@]}"
sweep connections model=llama3_70b operator=qkv,proj,fc1,fc2 runtime.max_connections=1,8 "${everyone[@]}"
if wanted naive; then
  for connections in 8 1; do
    timeout 120 torchrun --nproc-per-node "$tp" benchmarks/kernel_naive_timing.py "$connections" \
      > "$out/naive_$connections.txt" 2> "$out/naive_$connections.log"
    tail -20 "$out/naive_$connections.txt"
  done
fi
