#!/usr/bin/env bash
# Tune models on this machine's GPUs, each against a published preset; the summaries go to OUT/<model>.
#   benchmarks/tuner_results.sh OUT TP [llama3_8b llama3_70b llama3_405b llama3_70b:fp8_delayed]
set -u
out=$1 tp=$2
shift 2
cd "$(dirname "$0")/.."
mkdir -p "$out"
for which in "${@:-llama3_8b llama3_70b llama3_405b llama3_70b:fp8_delayed}"; do
  for one in $which; do
    model=${one%%:*} precision=${one#*:}
    [ "$precision" = "$one" ] && precision=bf16
    preset=benchmarks/presets/bf16_h100_h8192_tp4_mbs1_seqlen8192.yaml
    [ "$model" = llama3_405b ] && preset=benchmarks/presets/bf16_h100_h16384_tp8_mbs1_seqlen8192.yaml
    name=$model; [ "$precision" = bf16 ] || name=${model}_$precision
    timeout 290 python3 launch.py -m +experiment=tp_overlap_tuner "model=$model" "tp_size=$tp" "precision=$precision" \
      "tuner.presets=[$preset]" runtime.timeout_s=60 "hydra.sweep.dir=$out/$name" > "$out/$name.log" 2>&1
    echo "$name: exit $?, $(grep -c ' ok ' "$out/$name.log") lines ok, $(grep -o '"wall_s": [0-9.]*' "$out/$name/tuner.json")"
    grep '^search: ' "$out/$name.log" | tail -10
    # What the layers' variants spend, by phase and by class of kernels: what is between tuned and floor.
    for by in phase class; do
      python3 analyze.py trace "$out/$name"/proof_* --median --by $by --format csv > "$out/${name}_$by.csv"
    done
  done
done
