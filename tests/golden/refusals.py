"""Which points of every workload are refused and why, and what those that are not are called and are given.

A grid is written as one types a sweep; every combination of its values is a line of the golden file. Beside
configuration a combination may say what is `installed`, for which `cuda`, and what `slots` and `switches` a file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from overlap_sweep import workloads
from overlap_sweep.backends import transformer_engine
from overlap_sweep.config import PRECISIONS as PRECISIONS_OF_ALL
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.runtime.resolvers import point_name
from overlap_sweep.workloads import layer as layer_variants
from tests.composed import composed as composed_point
from tests.composed import fsdp_point, tp_point
from tests.make_point import resolved
from tests.points import gpu_point, kernel_point, layer_point

Point = dict[str, Any]
PACKAGES = ("transformer_engine", "megatron", "megatron.core", "deepspeed", "flash_attn", "flux")
GPUS = 8
ON_TORCH = "backend=torch runtime.device=cpu precision=fp32"
OVERLAPPING = "backend=torch,transformer_engine,symm_mem"
PRECISIONS = ",".join(PRECISIONS_OF_ALL)
FP8 = "precision=bf16,fp8_delayed,fp8_current"
BLOCKS = "precision=fp8_block,mxfp8,nvfp4"
IN_BLOCKS = "workload.tokens=2048 model.ffn_hidden_size=2048 model.hidden_size=1024"
DIVISIBLE = "workload.tokens=960 model.ffn_hidden_size=480 model.hidden_size=480"
SLOTS = "operator=qkv,proj,fc1,fc2 phase=all,fprop,dgrad,wgrad method=none,bulk,ring_exchange,pipeline"
KNOBS = (
    *("num_sm=32,33", "aggregate=false,true", "num_splits=4", "cga_size=2", "set_sm_margin=true", "use_ce=true,false"),
    *("atomic_gemm=true", "fp8_buf=false,true", "cga_size=2 set_sm_margin=true"),
    *("comm_priority=-5,0 gemm_priority=null,-1", "pipeline_rs_overlap_first_gemm=false,true"),
)
TARGETS = ("method=none,bulk,ring_exchange", "operator=fc2 method=ring_exchange,pipeline")
PIPELINES = ("operator=fc2 phase=fprop method=pipeline", "operator=fc1 phase=dgrad method=pipeline")
PHASES = (
    "phases={fprop:{method:ring_exchange},dgrad:{method:bulk},wgrad:{method:none}},{dgrad:{method:none}}",
    "phases={wgrad:{method:bulk,num_sm:2},fprop:{method:ring_exchange},dgrad:{method:none}}",
    "phases={dgrad:{method:ring_exchange},wgrad:{method:bulk}},{fprop:{method:pipeline},dgrad:{method:ring_exchange}}",
    "phases={fprop:{method:ring_exchange,num_sm:8,aggregate:false}}",
    "phases={fprop:{method:ring_exchange,aggregate:true,num_sm:null,use_ce:null},dgrad:{num_sm:1,method:bulk}}",
    "phases={wgrad:{method:none,set_sm_margin:true,atomic_gemm:false,fp8_buf:false}}",
)
NO_PHASES = (
    "phases=bulk,{},{fwd:{method:bulk}},{fprop:bulk},{fprop:{method:ring_exchange},dgrad:{num_sm:4}}",
    "phases={dgrad:{method:bulk,sms:4,1:2}},{dgrad:{method:bulk,num_sm:many}},{dgrad:{method:bulk,num_sm:true}}",
    "phases={dgrad:{method:bulk,cga_size:0}},{fprop:{method:ring_exchange,aggregate:1}},{wgrad:{method:bulk,num_sm:1}}",
)
OPERATOR = (
    f"{SLOTS} backend=transformer_engine,symm_mem",
    f"{OVERLAPPING},megatron runtime.device=cpu,cuda method=none,bulk precision={PRECISIONS}",
    f"{OVERLAPPING} tp_size=1,2,3,6,8,16 method=none,bulk {DIVISIBLE}",
    f"{OVERLAPPING} tp_size=1,3,6 method=ring_exchange aggregate=false,true {DIVISIBLE}",
    f"{OVERLAPPING} tp_size=2,6 operator=fc2 phase=fprop method=pipeline num_splits=4 {DIVISIBLE}",
    "operator=qkv,proj,fc1,fc2 tp_size=3,8,16 method=none",
    f"operator=fc1,fc2 method=none workload.tokens=129 {OVERLAPPING}",
    *(f"{target} {knobs} {OVERLAPPING}" for target in TARGETS for knobs in KNOBS),
    *(f"{target} {knobs} {ON_TORCH}" for target in TARGETS for knobs in KNOBS),
    f"{FP8} atomic_gemm=true method=ring_exchange,bulk cuda=12,13,14,null",
    f"{FP8} fp8_buf=true,false operator=fc2 phase=fprop,dgrad method=ring_exchange,pipeline",
    f"{FP8} model.ffn_hidden_size=36 backend=transformer_engine,megatron",
    f"{FP8} model.ffn_hidden_size=72 operator=fc2 method=none",
    f"{FP8} model.hidden_size=250",
    f"{FP8} workload.tokens=120",
    f"{FP8} tp_size=1 workload.tokens=120 method=none",
    *(f"{slot} precision=bf16,fp8_delayed num_splits=1,3,4,16,32,512" for slot in PIPELINES),
    f"{BLOCKS} {IN_BLOCKS} method=none,bulk,ring_exchange,pipeline",
    f"{BLOCKS} {IN_BLOCKS} phase=dgrad,wgrad method=bulk",
    f"{BLOCKS} {IN_BLOCKS} operator=fc2 method=none,ring_exchange,pipeline",
    f"{BLOCKS} {IN_BLOCKS} workload.tokens=192,224,232 tp_size=1,2 operator=fc1,fc2 method=none",
    f"{BLOCKS} {IN_BLOCKS} model.ffn_hidden_size=1376,2032 operator=fc2 method=none",
    f"{BLOCKS} {IN_BLOCKS} model.hidden_size=1056 operator=fc1,fc2 method=none tp_size=1,2",
    f"precision=mxfp8 {IN_BLOCKS} workload.tokens=192 phase=fprop,dgrad,wgrad method=bulk,ring_exchange",
    f"precision=mxfp8 {IN_BLOCKS} model.ffn_hidden_size=1088 operator=fc2 method=ring_exchange,pipeline phase=fprop",
    f"precision=mxfp8 {IN_BLOCKS} operator=fc2 method=pipeline phase=fprop num_splits=4,8,16",
    f"precision=mxfp8 {IN_BLOCKS} operator=fc2 method=pipeline phase=fprop fp8_buf=true,false atomic_gemm=true,false",
    "operator=fc2 phase=fprop method=ring_exchange aggregate=true",
    "with_cublasmp=true operator=fc1,fc2 method=none,bulk,ring_exchange,pipeline runtime.multicast=false,true",
    f"with_cublasmp=true method=ring_exchange {OVERLAPPING},megatron precision=bf16,fp8_delayed,fp16",
    "with_cublasmp=true,false method=ring_exchange use_ce=null,false aggregate=null,true",
    "runtime.max_connections=null,1,8 precision=fp8_delayed method=ring_exchange atomic_gemm=false,true",
    "precision=fp8_delayed operator=fc2 method=pipeline atomic_gemm=true pipeline_rs_overlap_first_gemm=true",
    *PHASES,
    *NO_PHASES,
    "backend=magic,flux",
    "installed=[],[transformer_engine],[megatron.core],[transformer_engine,megatron.core] "
    "backend=transformer_engine,megatron runtime.device=cpu,cuda",
)

NAMES = (
    SLOTS,
    f"{SLOTS} backend=torch num_sm=2 aggregate=true num_splits=2 cga_size=1 set_sm_margin=false use_ce=false "
    "atomic_gemm=false fp8_buf=true",
    f"{SLOTS} phase=all backend=torch num_sm=null",
    "backend=torch,symm_mem method=ring_exchange,none num_sm=8 aggregate=null,true,false",
    "operator=fc2 method=ring_exchange,pipeline num_splits=2 cga_size=1,2 set_sm_margin=false,true use_ce=false,true",
    "method=bulk num_sm=8 cga_size=1,2 set_sm_margin=false,true",
    *(f"backend=torch,transformer_engine,symm_mem {phases}" for phases in PHASES),
    "operator=fc2 method=pipeline,ring_exchange phase=all,dgrad fp8_buf=true,false precision=fp8_delayed",
    f"operator=fc2 method=pipeline fp8_buf=true,null workload.tolerance=null,0.01,0.0 precision={PRECISIONS}",
    "workload=operator model=any model.name=m tp_size=4 phases=null",
    "method=none num_sm=4,8 tp_size=4 +experiment=four_operators runtime.timeout_s=9 hydra.job.x=1 search.x=1",
    "method=none tp_size=4 layer.num_replicas=8 max_tp_size=4 tuner.x=1 resume=x store=x reuse=x",
    "model.name=/data/llama/config.json,a/../..,b/ num_splits=8 repetition=1 workload.seed=../../x",
    "workload=layer model=any layer=any layer.kind=linear,transformer_layer tp_size=1,4 layer.num_replicas=1,2",
    "workload=layer model.name=m",
    "workload=layer layer.training=true num_sm=8 precision=fp8_delayed repetition=3 layer.variants=[none,'file:/a/b']",
    "workload=kernel kernel=ag_gemm tp_size=2,4 m=24,8 n=48,null k=32 dtype=float16",
    "workload=kernel kernel=null operator=fc2 phase=all method=none num_sm=4 m=null n=null k=null phases=null",
    "workload=kernel model=any model.name=m kernel=gemm_rs n=null k=null",
    "workload=fsdp model=any distributed.strategy=fsdp2,ddp distributed.dp_size=2,4 tp_size=1 fsdp.replicas=1",
    "workload=fsdp model.name=m training.output_dir=/a/b",
    "workload=tp_training model=any model.name=m",
    "workload=tp_training impl=autotp,null dp_size=2,null tp_size=1,2 tp_training.output_dir=/a tp_training.seed=3",
    "workload=copy_engine model=any copy_engine.direction=peer,device_to_device copy_engine.matrix_size=32 tp_size=2 "
    "copy_engine.copy_mb=0.25,64 copy_engine.gemms=2",
)

KINDS = f"layer.kind={','.join(space.LAYER_KINDS)}"
PRESETS = f"layer.variants={','.join(f'[{name}]' for name in layer_variants.PRESETS)}"
_OTHERS = "tp_comm_overlap_ag:false,tp_comm_overlap_rs:false,tp_comm_bulk_dgrad:false"
OFF, ONLY_WGRAD = f"{{{_OTHERS},tp_comm_bulk_wgrad:false}}", f"{{{_OTHERS}}}"
PARTS = "layer.kind=multihead_attention,layernorm_mlp,layernorm_linear"
SWITCHED = "layer.comm_overlap=true,false"
HEADS = "model.num_attention_heads=48 model.num_kv_heads=48 model.hidden_size=768 model.ffn_hidden_size=1536"
FILES = (
    "slots={fc1_fprop:{num_sm:33}},{fc1_fprop:{num_sm:4}},{fc1_fprop:{method:pipeline}},{fc1_wgrad:{method:bulk}}",
    "slots={fc1_fprop:{method:ring_exchange,num_sm:64}},{fc1_fprop:{method:ring_exchange,num_sm:4}}",
    "slots={fc1_fprop:{method:ring_exchange,use_ce:1},proj_fprop:{method:pipeline}}",
    "slots={fc1_fprop:{method:ring_exchange,use_ce:0}} switches={},{tp_comm_overlap_ag:false}",
    "slots={fc1_dgrad:{method:ring_exchange}},{fc1_dgrad:{method:pipeline}} switches={tp_comm_overlap_rs_dgrad:false}",
    "slots={fc1_dgrad:{method:ring_exchange}},{qkv_dgrad:{method:ring_exchange}}",
    "slots={fc1_dgrad:{method:bulk}} switches={tp_comm_overlap_rs_dgrad:true}",
    "slots={fc1_dgrad:{method:bulk,set_sm_margin:1}},{fc1_dgrad:{method:bulk,cga_size:2}}",
    "slots={fc1_dgrad:{method:bulk,comm_priority:0}},{fc1_dgrad:{method:bulk,use_ce:1}}",
    "slots={fc1_dgrad:{method:pipeline},fc1_wgrad:{method:bulk}},{fc2_fprop:{method:pipeline,num_splits:3}}",
    "slots={fc2_fprop:{method:pipeline,num_splits:4}} num_splits=3 atomic_gemm=true",
    "slots={fc2_fprop:{method:pipeline}},{fc1_fprop:{method:ring_exchange}},{} "
    "switches={tp_comm_overlap:false},{tp_comm_overlap_disable_fc1:true},{tp_comm_overlap_disable_qkv:true}",
    "slots={} switches={},{tp_comm_overlap_ag:false,tp_comm_overlap_rs:false,tp_comm_bulk_dgrad:false}",
)
LAYER = (
    f"{KINDS} {PRESETS} {OVERLAPPING}",
    f"{KINDS} {PRESETS} {ON_TORCH}",
    f"{KINDS} layer.variants=[default],[atomic] precision=fp8_delayed,fp8_current cuda=12,13,null",
    f"{PRESETS} num_sm=null,32,33 aggregate=null,true",
    *(f"{OVERLAPPING} {files}" for files in FILES),
    *(f"{ON_TORCH} {files}" for files in FILES),
    *(f"{PARTS} {files}" for files in FILES),
    f"{OVERLAPPING},megatron runtime.device=cpu,cuda precision={PRECISIONS}",
    "installed=[] layer.kind=linear",
    "backend=auto installed=[],[transformer_engine] runtime.device=cpu,cuda",
    *(f"layer.variants={names} {OVERLAPPING}" for names in ("[none,atomic,default]", "[none,default,atomic,bulk]")),
    f"layer.variants=[none,atomic],[default,none],[bulk,bulk,floor,none],[none],[],[floor],null {SWITCHED}",
    f"layer.ub_overlap_rs_dgrad=true layer.variants=null,[default] backend=transformer_engine,torch {SWITCHED}",
    "layer.ub_overlap_ag=null,false layer.ub_bulk_wgrad=null,true layer.ub_overlap_rs_dgrad=false,true "
    "backend=transformer_engine,torch,symm_mem",
    f"layer.ub_overlap_rs=false layer.variants=[default] layer.tp_comm_overlap_cfg=null,/nowhere.yaml {SWITCHED}",
    f"with_cublasmp=true {PRESETS} runtime.multicast=false,true",
    f"layer.tp_comm_overlap_cfg=/nowhere.yaml layer.variants=null,[default] {SWITCHED}",
    f"layer.tp_comm_overlap_cfg=/nowhere.yaml layer.ub_overlap_rs_dgrad=true {SWITCHED}",
    "layer.variants=[magic],[Default],[fc1_dgrad],[cfg.yaml],[''],['file:/nowhere/a/b.yaml','file:/nowhere/a-b.yaml']",
    "layer.micro_batch_size=2,3,128",
    f"{FP8} workload.tokens=120",
    f"{BLOCKS} {IN_BLOCKS} layer.kind=linear,transformer_layer layer.variants=null,[none],[default],[bulk]",
    f"{BLOCKS} {IN_BLOCKS} slots={{fc1_wgrad:{{method:bulk,num_sm:4}}}} switches={OFF},{ONLY_WGRAD},{{}}",
    f"{BLOCKS} tp_size=1 layer.comm_overlap=false workload.tokens=120,128",
    f"precision=mxfp8 {IN_BLOCKS} workload.tokens=192 layer.variants=[default],[none]",
    f"tp_size=8 {KINDS}",
    f"tp_size=1 layer.variants=null,[bulk] {SWITCHED} {OVERLAPPING}",
    f"tp_size=3,16 {HEADS} workload.tokens=768 {OVERLAPPING} layer.variants=[default],[ring_exchange]",
    f"tp_size=6 {HEADS} workload.tokens=768 {ON_TORCH} layer.variants=[ring_exchange]",
)

LLAMA = "model.hidden_size=4096 model.ffn_hidden_size=14336 model.num_attention_heads=32 model.num_kv_heads=8"
LARGE = "n=8192 k=4096 workload.tokens=2048 tp_size=4"
ALL_KERNELS = "kernel=ag_gemm,gemm_rs,gemm_ar"
KERNEL = (
    f"{ALL_KERNELS} {OVERLAPPING},flux runtime.device=cpu,cuda precision=fp32,fp16,bf16,fp8_delayed {LARGE}",
    f"{ALL_KERNELS} {OVERLAPPING},flux runtime.device=cuda precision=null dtype=float8_e4m3fn n=8192,8200 k=4096 "
    "workload.tokens=2048 tp_size=4",
    "precision=null dtype=float16,bfloat16,float32 backend=flux kernel=gemm_rs runtime.device=cuda",
    "backend=transformer_engine runtime.device=cuda precision=bf16 n=12288 workload.tokens=6144 tp_size=2,3,6,16",
    f"{ALL_KERNELS} tp_size=1,2,4",
    f"{ALL_KERNELS} workload.tokens=23",
    *("tp_size=5", "n=47", "kernel=gemm_rs k=33"),
    *("k=null", "n=null", "kernel=null", "dtype=float16", "m=48", "iters=5", "warmup_iters=7"),
    "implementations=[],[ring_sm513],[warp],[ring_ce0],[ring,ring_sm4,bulk_sm3,pipeline_split5],[ring_agg0,ring_agg1]",
    f"kernel=ag_gemm,gemm_rs backend=transformer_engine runtime.device=cuda precision=bf16 {LARGE} implementations="
    "[ring,ring_sm4],[bulk_sm32],[bulk_sm33],[pipeline_split3],[pipeline_sm12_split8_margin0],[bulk_ce1],[ring_agg1],"
    "[pipeline_first1],[ring_first1],[bulk_commprio-1_gemmprio-2],[bulk_commprio1]",
    "implementations=[ring],[warp] backend=symm_mem,flux runtime.device=cuda precision=bf16",
    "implementations=[bulk_sm2],[pipeline_sm2],[ring] kernel=gemm_ar",
    "backend=megatron,magic,auto",
    f"backend=flux runtime.device=cuda precision=fp16,bf16 {ALL_KERNELS} k=24,32 n=40,48",
    "backend=flux runtime.device=cuda precision=null dtype=float8_e4m3fn k=48 n=32,48 workload.tokens=32",
    "installed=[] backend=transformer_engine,flux,symm_mem runtime.device=cuda precision=bf16",
    f"operator=qkv,proj,fc1,fc2 kernel=null,ag_gemm,gemm_rs,gemm_ar n=null k=null {LLAMA} model.head_dim=128",
)

DDP = "distributed.strategy=ddp"
OVERLAP = "distributed.enable_overlap"
FSDP = (
    *("fsdp.forward_prefetch=often,-1,1025,true,3", "fsdp.reshard_after_forward=1,often,2,true,false"),
    *("fsdp.backward_prefetch=LATER,null", "backend=torch", "precision=bf16", "copy_engine.matrix_size=8", "m=8"),
    *("impl=autotp", "dp_size=2", "tp_training.batch_size=2", "distributed.dp_size=0", "layer.training=true"),
    "runtime.device=cuda distributed.dp_size=8,9",
    *(f"+distributed.env.{given}" for given in ("LD_PRELOAD=x", "NCCL_NVLS_ENABLE=1", "NCCL_CONF_FILE=a")),
    *(f"+distributed.env.{given}" for given in ("HIP_VISIBLE_DEVICES=0", "CUDA_DEVICE_MAX_CONNECTIONS=1")),
    "distributed.env.NCCL_ALGO=[Ring,Tree],NVLSTree,Ring,null",
    *("fsdp.use_orig_params=false", "fsdp.replicas=1,2,3", "fsdp.sync_module_states=false"),
    *(f"{DDP} fsdp.forward_prefetch=true", f"{DDP} fsdp.sync_module_states=false"),
    f"distributed.strategy=fsdp2,ddp distributed.overlap_reduce_scatter=true,false {OVERLAP}=true,false",
    f"distributed.strategy=fsdp2,ddp streams.auxiliary=normal {OVERLAP}=true,false",
    f"distributed.strategy=fsdp2,ddp streams.all_reduce=normal streams.reduce_scatter=high,normal {OVERLAP}=true",
    f"{DDP} streams.reduce_scatter=normal {OVERLAP}=true distributed.overlap_reduce_scatter=true,false",
    f"{DDP} {OVERLAP}=true distributed.overlap_clone_for_reduce_scatter=false",
    "distributed.dp_size=8 fsdp.replicas=1,2,4 fsdp.reshard_after_forward=true,2,3,4,8",
    *("distributed.strategy=fsdp2,ddp distributed.bucket_cap_mb=5", "distributed.gradient_as_bucket_view=false"),
    "fsdp.replicas=2 distributed.dp_size=4 streams.all_reduce=normal distributed.enable_overlap=true",
    "distributed.strategy=fsdp2,ddp fsdp.layers_per_unit=1,2,4 fsdp.separate_reduce_scatter_group=false,true",
    "fsdp.separate_reduce_scatter_group=true fsdp.replicas=1,2",
    "distributed.strategy=fsdp2,ddp fsdp.symmetric_memory=null,kernels,copy_engines runtime.device=cpu,cuda",
    "fsdp.symmetric_memory=multicast",
    "fsdp.symmetric_memory=kernels runtime.device=cuda distributed.dp_size=4 fsdp.reshard_after_forward=true,2",
    "fsdp.symmetric_memory=kernels,copy_engines runtime.device=cuda +distributed.env.NCCL_CTA_POLICY=2",
    "compile.enabled=true,false compile.mode=null,default",
    "compile.enabled=true compile.mode=null,default +compile.options.trace.enabled=true",
    *("model.num_kv_heads=3", "profiling.tensorboard=true", "profiling.tensorboard=true profiling.enabled=true"),
    *("training.output_dir=/a/b", "distributed.dp_size=4 model.name=ranking"),
)
COPY_ENGINE = (
    "copy_engine.direction=host_to_device,device_to_host,device_to_device,peer runtime.device=cpu,cuda",
    *("backend=torch", "copy_engine.matrix_size=32 copy_engine.copy_mb=0.25 runtime.device=cuda", "fsdp.replicas=2"),
    "copy_engine.matrix_size=32 copy_engine.chunks=null,1,32,33",
)
ALL_STACKS = "impl=autotp,fsdp_dtensor,async_tp,megatron"
TP_TRAINING = (
    f"{ALL_STACKS} runtime.device=cpu,cuda tp_size=1,2",
    f"{ALL_STACKS} runtime.device=cpu,cuda tp_training.attn_impl=flash_attention_2 tp_training.dtype=float32,bfloat16",
    "runtime.device=cuda tp_training.attn_impl=flash_attention_2 tp_training.autocast=true",
    f"{ALL_STACKS} tp_training.sequence_parallel=true,false runtime.device=cuda tp_training.dtype=bfloat16",
    f"{ALL_STACKS} tp_training.seq_length=15 runtime.device=cuda",
    "impl=autotp tp_training.dtype=float16 tp_training.zero_stage=0,1 tp_training.autocast=false,true",
    *(f"{ALL_STACKS} tp_training.{each}" for each in ("autocast=true", "compile=true", "vocab_parallel=false")),
    *(f"{ALL_STACKS} installed={there} runtime.device=cuda" for there in ("[]", "[megatron]")),
    "impl=megatron installed=[megatron,megatron.core] runtime.device=cpu,cuda",
    "installed=[] tp_training.attn_impl=flash_attention_2 runtime.device=cuda",
    "tp_size=4",
    "model.num_attention_heads=6 model.num_kv_heads=4 tp_size=2,4",
    *("model.head_dim=7", "model.ffn_hidden_size=97", "runtime.device=cuda dp_size=4,512", "impl=zero"),
    *("tp_training.warmup_steps=4,5", "backend=torch", "precision=bf16", "model=gpt3_175b", "model.vocab_size=null"),
    *("model.architecture=bert,llama", "tp_training.zero_stage=3", "m=8", "fsdp.replicas=2"),
    "impl=megatron,autotp tp_training.tp_comm_overlap_cfg=/nowhere.yaml",
    "impl=megatron runtime.device=cuda tp_training.dtype=float32,bfloat16 tp_training.tp_comm_overlap=true,false "
    "tp_size=2,3 model.num_attention_heads=6 model.num_kv_heads=6 tp_training.seq_length=48",
)


def write(folder: Path) -> None:
    """Writes a file for each workload, and one of the names and settings of operators."""
    folder.mkdir()
    for workload, grids in GRIDS.items():
        lines = [f"{' '.join(overrides)} -> {said(workload, overrides)}\n" for overrides in combinations(grids)]
        (folder / f"{workload}.txt").write_text("".join(lines))
    lines = [f"{' '.join(overrides)} -> {described(overrides)}\n" for overrides in combinations(NAMES)]
    (folder / "names.txt").write_text("".join(lines))


def combinations(grids: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for grid in grids:
        yield from product(*(_choices(override) for override in grid.split()))


@cache
def _choices(text: str) -> tuple[str, ...]:
    override = OverridesParser.create().parse_override(text)
    if not override.is_sweep_override():
        return (text,)
    return tuple(f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator())


@cache
def _value(text: str) -> Any:
    return OverridesParser.create().parse_override(text).value()


def said(workload: str, overrides: Sequence[str]) -> str:
    """Returns the reason or the user's error, or that it is ok, with what will be run."""
    here = [text for text in overrides if not text.startswith(("installed=", "cuda="))]
    given = {text.partition("=")[0]: _value(text) for text in overrides if text not in here}
    with machine(**given) as has:
        try:
            point = POINTS[workload](here)
            with mock.patch("overlap_sweep.workloads.tp_training.find_spec", has):
                reason = workloads.load(workload).refusal(point)
        except UserError as error:
            return f"error: {error}"
        return f"refused: {reason}" if reason else f"ok: {_runs(workload, point)}"


@contextmanager
def machine(installed: Sequence[str] = PACKAGES, cuda: int | None = 12) -> Iterator[Callable[[str], str | None]]:
    """This process has these packages, for this CUDA, and eight GPUs; whether it has a package."""
    no_flux = None if "flux" in installed else "Flux is not installed"

    def has(package: str) -> str | None:
        return package if package in installed else None

    transformer_engine.missing.cache_clear()
    with (
        mock.patch.object(transformer_engine, "find_spec", has),
        mock.patch.object(transformer_engine, "cuda_major", return_value=cuda),
        mock.patch("overlap_sweep.backends.flux.missing", return_value=no_flux),
        mock.patch("overlap_sweep.runtime.point.visible_gpus", return_value=GPUS),
    ):
        try:
            yield has
        finally:
            transformer_engine.missing.cache_clear()


def _runs(workload: str, point: Point) -> str:
    if workload == "kernel":
        return f"{workloads.of(point).subject(point)} by {point['backend']}'s {' '.join(point['implementations'])}"
    if workload == "layer":
        configs = workloads.load("layer").overlap_configs(point)
        names = [name for name in layer_variants.names(point) if name in ("none", "floor", *configs)]
        return f"{' '.join(names)} by {point['backend']}"
    return _size(point)


def described(overrides: Sequence[str]) -> str:
    """Returns a point's name, subject and ranks; of an operator also settings, the passes it is about and tolerance."""
    workload = overrides[0].partition("=")[2] if overrides[0].startswith("workload=") else "operator"
    changes = [text for text in overrides if not text.startswith(("workload=", "model=", "layer=", "+", "hydra."))]
    asked = _changed(ASKED[workload](), changes)
    # Every configuration that Hydra composes has a method.
    found = f"{point_name({'method': 'none', **asked}, [*overrides])}: {_size(asked)}"
    if workload != "operator":
        return found
    point = _completed(asked)
    settings = space.settings(point)
    given = ", ".join(f"{slot} {space.setting_name(setting)}" for slot, setting in settings.items())
    about = f"{'+'.join(space.passes(point))} within {space.tolerance(point):g}"
    return f"{found}; {given or 'no overlap'}; {space.settings_name(settings)}; {about}"


def _size(point: Point) -> str:
    return (
        f"{workloads.of(point).subject(point)} on {workloads.world_size(point)} ranks of {workloads.gpus(point)} GPUs"
    )


def _layer(overrides: Sequence[str]) -> Point:
    point = _changed(layer_point(), overrides)
    if "slots" in point:
        comments = "".join(f"# {name}: {str(on).lower()}\n" for name, on in (point.pop("switches", None) or {}).items())
        Path("cfg.yaml").write_text(comments + yaml.safe_dump(point.pop("slots")))
        point["layer"] = {**point["layer"], "variants": ["file:cfg.yaml"]}
    return _completed(point)


def _completed(point: Mapping[str, Any]) -> Point:
    completed: Point = workloads.of(point).complete(point)
    return completed


def _changed(point: Mapping[str, Any], overrides: Sequence[str]) -> Point:
    changed = dict(point)
    for override in overrides:
        key, _, name = override.partition("=")[0].partition(".")
        changed[key] = {**changed[key], name: _value(override)} if name and key in changed else _value(override)
    return changed


GRIDS = {
    "operator": OPERATOR,
    "layer": LAYER,
    "kernel": KERNEL,
    "fsdp": FSDP,
    "copy_engine": COPY_ENGINE,
    "tp_training": TP_TRAINING,
}
ASKED: dict[str, Callable[[], Point]] = {
    **{name: partial(resolved, name) for name in ("fsdp", "copy_engine", "tp_training")},
    **{"operator": gpu_point, "layer": layer_point, "kernel": kernel_point},
}
POINTS: dict[str, Callable[[Sequence[str]], Point]] = {
    "operator": lambda overrides: _completed(_changed(gpu_point(), overrides)),
    "layer": _layer,
    "kernel": lambda overrides: _completed(_changed(kernel_point(), overrides)),
    "fsdp": lambda overrides: fsdp_point(*overrides),
    "copy_engine": lambda overrides: composed_point("workload=copy_engine", *overrides),
    "tp_training": lambda overrides: tp_point(*overrides),
}
