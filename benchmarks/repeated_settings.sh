#!/usr/bin/env bash
# Measures settings that are truly equal again and again, each workload in a sweep of its own, and tells how often the
# sweeps' decisions would tell them apart.
#   benchmarks/repeated_settings.sh OUT DEVICE [NAME ...]     DEVICE: cpu or cuda; only those of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 device=$2 only=" ${*:3} "
limit_s=${LIMIT_S:-170} always=(runtime.device="$device" profile=none)
source benchmarks/recorded_sweeps.sh

mkdir -p "$out"
for name in first second third; do echo 'fc1_fprop: {method: ring_exchange}' > "$out/$name.yaml"; done
alike="[none,file:$out/first.yaml,file:$out/second.yaml,file:$out/third.yaml]"

if [[ $device == cuda ]]; then
  model=llama3_8b kernels=(operator=fc1,fc2 m=512,8192)
  layer=(model=llama3_8b)
  step=(model=llama3_8b ranking.num_layers=2 ranking.sequence_length=32 training.batch_size=16 training.max_steps=6)
  stack=(model=qwen3_0_6b model.num_layers=2 tp_training.seq_length=2048 tp_training.num_training_steps=15)
else
  model=qwen3_tiny kernels=(kernel=ag_gemm,gemm_rs m=256 n=1024 k=512)
  layer=(model=qwen3_tiny)
  step=(model=ranking_tiny training.max_steps=6 workload.repeats=9)
  stack=(model=qwen3_tiny tp_training.seq_length=64 tp_training.num_training_steps=15)
fi
sweep operator model="$model" tp_size=2 operator=fc1,proj method=none repetition="$(seq -s, 0 11)"
sweep kernel workload=kernel tp_size=2 backend=torch "${kernels[@]}" repetition="$(seq -s, 0 7)"
sweep layer workload=layer tp_size=2 "${layer[@]}" layer.variants="$alike" repetition="$(seq -s, 0 5)"
sweep fsdp workload=fsdp "${step[@]}" repetition="$(seq -s, 0 7)"
sweep tp_training workload=tp_training impl=fsdp_dtensor tp_size=2 dp_size=1 "${stack[@]}" repetition="$(seq -s, 0 7)"
python3 -m benchmarks.repeated_settings "$out"
