#!/usr/bin/env bash
# Records the run directories of tests/golden/inputs on two GPUs, each with its log in OUT; archives.py packs them. Of
# knob_search without its rank_*_metrics.jsonl, which would be most of the archive; paths of the machine are replaced.
#   tests/golden/record.sh OUT [NAME ...]     only those of these names
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1 only=" ${*:2} "
limit_s=150 always=()
source benchmarks/recorded_sweeps.sh

llama3=(model=llama3_8b tp_size=2)
layers=(workload=fsdp model=llama3_8b ranking.num_layers=2 ranking.sequence_length=32 training.batch_size=16)
operators=("${llama3[@]}" operator=fc1,fc2 method=bulk,ring_exchange,pipeline num_sm=4,16 profile=best)

sweep operators "${operators[@]}"
sweep operators_8_connections "${operators[@]}" runtime.max_connections=8
sweep layer workload=layer "${llama3[@]}" 'layer.variants=[none,default,ring_exchange,rs_dgrad]'
sweep kernel workload=kernel "${llama3[@]}" operator=fc1,fc2 m=512,8192 \
  backend=torch,transformer_engine,symm_mem,flux profile=none
sweep fsdp "${layers[@]}" fsdp.forward_prefetch=false,1 fsdp.reshard_after_forward=true,false training.max_steps=6 \
  profiling.active=1
sweep copy_engine workload=copy_engine copy_engine.matrix_size=2048,8192 copy_engine.copy_mb=16,64 \
  copy_engine.direction=device_to_device,device_to_host profile=none
sweep tp_training +experiment=tp_training model=qwen3_0_6b model.num_layers=2 tp_size=2 dp_size=1 \
  tp_training.seq_length=2048 tp_training.num_training_steps=8 tp_training.warmup_steps=3
sweep tuner +experiment=tp_overlap_tuner "${llama3[@]}" search.max_minutes=0.7
sweep knob_search +experiment=fsdp_overlap "${layers[@]:1}" search.max_minutes=1.5
sweep job workload=job 'job.command="torchrun --nproc-per-node={ranks} train.py --bucket-cap-mb {bucket}"' job.ranks=2 \
  job.directory=tests/golden +job.values.bucket=25,0.05 repetition=0,1 job.samples_per_step='"64 * {ranks}"' job.steps=30 \
  job.profile_steps=2 runtime.device=cpu
