#!/usr/bin/env bash
# The runs behind docs/results/*-userbuffers-*.md, each with its log and its analysis in OUT, the most wanted first.
#   benchmarks/userbuffers_results.sh OUT [TP [NAME ...]]     only the runs of these names
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 tp=${2:-8} only=" ${*:3} "
limit_s=240 always=(tp_size="$tp")
source benchmarks/recorded_sweeps.sh

# NAME PRECISION: what that sweep chose, on the whole layer.
tuned() {
  local file=$out/$1/optimal_tp_comm_overlap_cfg.yaml
  sweep "$1_layer" workload=layer model=llama3_70b precision="$2" profile=none \
    "layer.variants=[none,default,ring_exchange,rs_dgrad,file:$file]"
}

grid=(operator=qkv,proj,fc1,fc2 method=bulk,ring_exchange,pipeline num_sm=1,2,3,4,6,8,10,12,16,20,24,28,32 profile=best)
layers=(workload=layer 'layer.variants=[none,default,ring_exchange,rs_dgrad]' profile=none)

sweep llama3_70b backend=transformer_engine model=llama3_70b "${grid[@]}"
tuned llama3_70b bf16
sweep layers "${layers[@]}" model=llama3_70b,llama3_405b precision=bf16,fp8_delayed
sweep repetitions repetition=0,1,2,3,4 backend=transformer_engine,megatron model=llama3_70b \
  operator=qkv,proj,fc1,fc2 method=ring_exchange num_sm=4 profile=none
sweep qwen3_0_6b backend=transformer_engine model=qwen3_0_6b "${grid[@]}"
sweep llama3_70b_fp8 backend=transformer_engine model=llama3_70b precision=fp8_delayed "${grid[@]}"
tuned llama3_70b_fp8 fp8_delayed

# Switches of the default on the whole layer, and knobs of slots that no other run changes.
without="none,default,'default ub_overlap_ag=false','default ub_overlap_rs=false',"
without+="'default ub_bulk_wgrad=false','default ub_bulk_dgrad=false'"
sweep switches workload=layer model=llama3_70b profile=none "layer.variants=[$without]"
knobs=(backend=transformer_engine model=llama3_70b profile=none)
sweep first_gemm "${knobs[@]}" operator=proj,fc2 method=pipeline num_sm=8,16 pipeline_rs_overlap_first_gemm=false,true
sweep priorities "${knobs[@]}" operator=qkv,fc1 method=bulk num_sm=2,8 comm_priority=null,-1 gemm_priority=null,-2
