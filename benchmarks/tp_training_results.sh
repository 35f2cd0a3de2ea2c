#!/usr/bin/env bash
# The runs behind docs/results/*-tp-training-*.md, each with its log and its analysis in OUT, the most wanted first.
#   benchmarks/tp_training_results.sh OUT [RANKS [NAME ...]]     only the runs of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 ranks=${2:-8} only=" ${*:3} "
limit_s=290 always=(+experiment=tp_training tp_training.num_training_steps=30)
source benchmarks/recorded_sweeps.sh

# Llama-3 8B whole, and layers of Qwen3 32B's sizes, as many as every stack has memory for.
llama3=(model=llama3_8b tp_size="$ranks" dp_size=1)
qwen3=(model=qwen3_32b model.num_layers=8 tp_size="$ranks" dp_size=1)
long=(tp_training.seq_length=8192)

sweep llama3_8b_long "${llama3[@]}" "${long[@]}"
sweep qwen3_32b_long "${qwen3[@]}" "${long[@]}"
sweep llama3_8b "${llama3[@]}"
sweep qwen3_32b "${qwen3[@]}"

# Megatron-Core with the overlap that the tuner finds for the model's layers, and without overlap.
if wanted tuned; then
  timeout 200 python3 launch.py -m +experiment=tp_overlap_tuner model=llama3_8b tp_size="$ranks" search.max_minutes=1 \
    hydra.sweep.dir="$out/tuner" > "$out/tuner.log" 2>&1
fi
sweep tuned "${llama3[@]}" "${long[@]}" impl=megatron \
  tp_training.tp_comm_overlap_cfg="$out/tuner/optimal_tp_comm_overlap_cfg_tp$ranks.yaml"
sweep not_overlapped "${llama3[@]}" "${long[@]}" impl=megatron tp_training.tp_comm_overlap=false

sweep compiled "${llama3[@]}" "${long[@]}" impl=fsdp_dtensor,autotp tp_training.compile=true
grids=$ranks
for tp_size in 1 2 4; do
  ((tp_size < ranks)) || continue
  grids=$tp_size,$grids
  sweep "llama3_8b_tp$tp_size" "${llama3[@]}" "${long[@]}" tp_size="$tp_size" dp_size=$((ranks / tp_size))
  sweep "qwen3_32b_tp$tp_size" "${qwen3[@]}" "${long[@]}" tp_size="$tp_size" dp_size=$((ranks / tp_size))
done

# Every stack at its best settings, on every grid.
limit_s=580 always=()
sweep best +experiment=tp_training_best model=llama3_8b ranks="$ranks" tp_size="$grids" "${long[@]}" search.max_minutes=8
