#!/usr/bin/env bash
# The runs behind docs/results/*-tp-training-*.md, each with its log and its analysis in OUT, the most wanted first.
#   benchmarks/tp_training_results.sh OUT [RANKS [NAME ...]]     only the runs of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 ranks=${2:-8} only=" ${*:3} "
limit_s=290 always=(+experiment=tp_training tp_training.num_training_steps=30)
source benchmarks/recorded_sweeps.sh

# Layers of the sizes of Qwen3 32B and of Llama-3 8B, as many as every stack has memory for.
qwen3=(model=qwen3_32b model.num_layers=8)
llama3=(model=llama3_8b model.num_layers=16)
long=(tp_training.seq_length=8192)

sweep qwen3_32b "${qwen3[@]}" tp_size="$ranks" dp_size=1
sweep llama3_8b "${llama3[@]}" tp_size="$ranks" dp_size=1
sweep llama3_8b_long "${llama3[@]}" tp_size="$ranks" dp_size=1 "${long[@]}"
sweep qwen3_32b_long "${qwen3[@]}" tp_size="$ranks" dp_size=1 "${long[@]}"
for tp_size in 2 4; do
  ((tp_size < ranks)) || continue
  sweep "qwen3_32b_tp$tp_size" "${qwen3[@]}" tp_size="$tp_size" dp_size=$((ranks / tp_size))
  sweep "llama3_8b_tp$tp_size" "${llama3[@]}" tp_size="$tp_size" dp_size=$((ranks / tp_size))
done
sweep compiled "${llama3[@]}" tp_size="$ranks" dp_size=1 "${long[@]}" impl=fsdp_dtensor,autotp tp_training.compile=true
