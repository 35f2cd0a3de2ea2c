#!/usr/bin/env bash
# Layers with experts under every way for the experts to communicate, each with its log and its analysis in OUT, the most
# wanted first.
#   benchmarks/moe_results.sh OUT [RANKS [NAME ...]]     only the runs of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 ranks=${2:-8} only=" ${*:3} "
limit_s=200 always=(workload=layer layer=moe layer.moe.ep_size="$ranks")
source benchmarks/recorded_sweeps.sh

sweep mixtral_8x7b model=mixtral_8x7b runtime.max_connections=1,8,32 layer.moe.routing=balanced,random
sweep qwen3_30b_a3b model=qwen3_30b_a3b runtime.max_connections=1,8,32 profile=none
sweep tensor_parallel model=mixtral_8x7b tp_size=1,2 profile=none
sweep num_sm model=mixtral_8x7b layer.moe.num_sm=none,4,8,16,32 profile=none
