"""Chooses the setting to try, by cause, by what the collective carries, and by the libraries that the trace shows.

Causes are decided without names; only the words here depend on them. `docs/diagnosis.md` lists all options by cause,
those that are named here among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_sweep.diagnosis import Cause
from overlap_sweep.diagnosis.advice_between_nodes import BETWEEN_NODES
from overlap_sweep.diagnosis.advice_on_communication import COMMUNICATION, OVERLAP, Advice, advice_on

_IN_TURN = (
    advice_on(
        *("straggler", "late_before"),
        "What makes it late lies before its recording: record more steps, of all ranks from the same step on.",
    ),
    advice_on(
        *("straggler", "in_turn host_late"),
        "See what the late ranks' hosts do when they are late, such as garbage collection (gc.freeze()), and launch "
        "less: behind a CUDA graph a host's pauses don't matter.",
    ),
    advice_on(
        *("straggler", "in_turn loads_longer"),
        "Load ahead on all ranks: more num_workers of the DataLoader, or a larger prefetch_factor.",
    ),
    advice_on(
        *("straggler", "in_turn more_work all_to_all"),
        "Balance the tokens over the experts of each layer: Megatron-Core moe_router_load_balancing_type, "
        "moe_expert_capacity_factor.",
    ),
    advice_on(
        *("straggler", "in_turn more_work"),
        "Balance the work between any two collectives, such as the lengths of sequences; or let ranks meet less often: "
        "in fewer and larger collectives differences even out.",
    ),
    advice_on(
        *("straggler", "in_turn"),
        "No single rank is slow. Let ranks meet less often: in fewer and larger collectives, differences of clocks and "
        "launches even out.",
    ),
)
_WITHOUT_TRAINING = (
    advice_on(
        *("straggler host_bound", "pauses allocates"),
        "The allocator asks the driver for memory, or gives it back, in mid-step: leave more of it free (a smaller "
        "batch), or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    advice_on(
        *("straggler host_bound", "pauses stalled !loading"),
        "No line of the program takes this long: see what else runs on its cores, and whether they are its own "
        "(taskset, OMP_NUM_THREADS), and whether its memory is swapped.",
    ),
    advice_on(
        *("straggler host_bound", "untrained pauses unnamed"),
        "profile(with_stack=True) names the function. Do it less often, in another thread, or before what is timed; "
        "Python's garbage collection looks the same: gc.freeze().",
    ),
    advice_on(
        *("straggler host_bound", "untrained pauses"),
        "Shorten it, or do it less often, in another thread or process, or before what is timed.",
    ),
    advice_on(
        *("dependency", "untrained norm"),
        "It moves next to nothing: what it costs is the wait for the last rank.",
    ),
    advice_on(
        *("dependency", "untrained userbuffers"),
        "It overlaps already, but not all of it: overlap-sweep tune finds the method and num_sm that leave the least "
        "exposed on this machine.",
    ),
    advice_on(
        *("dependency", "untrained point_to_point"),
        "Send and receive ahead: isend() and irecv() before computation that does not need the data, wait() where it "
        "is needed.",
    ),
    advice_on(
        *("dependency", "untrained"),
        "Overlap it with the GEMM that makes or needs its data, in pieces: overlap-sweep tune compares the methods on "
        "this machine.",
    ),
    advice_on(
        *("issued_late", "untrained"),
        "Launch it as soon as its input is ready, with async_op=True, and wait() where the result is needed.",
    ),
    advice_on(
        *("bandwidth", "untrained"),
        "More computation next to it (more tokens), fewer bytes (FP8), or a smaller process group.",
    ),
    advice_on(
        *("straggler", "untrained host_late !cpu"),
        "Its host launches too slowly, without long pauses: launch less (a CUDA graph), and see what else runs on its "
        "cores.",
    ),
    advice_on(
        *("straggler", "untrained more_work"),
        "Balance the work: give each rank as much.",
    ),
    advice_on(
        *("straggler", "untrained !cpu !unknown_rank"),
        "Compare that rank's clocks, power and temperature with the others' (nvidia-smi -q -d "
        "CLOCK,POWER,TEMPERATURE), and what else runs on its host.",
    ),
    advice_on(
        *("straggler", "untrained cpu !unknown_rank"),
        "See what else runs on that rank's cores, and whether they are its own (taskset, OMP_NUM_THREADS).",
    ),
    advice_on(
        *("host_bound", "untrained cpu"),
        "It is Python's time between operators: more tokens, or fewer and larger operators.",
    ),
    advice_on(
        *("host_bound", "untrained"),
        "The kernels are shorter than their launches: more tokens, or a CUDA graph.",
    ),
    advice_on(
        *("host_sync", "untrained !end_of_step"),
        "Take what makes the host wait out of what is timed: torch.cuda.synchronize(), .item(), nonzero() and such.",
    ),
)
_PAUSES = (
    advice_on(
        *("host_bound", "loading loader_workers"),
        "Load ahead: more num_workers of the DataLoader or a larger prefetch_factor; or make less of each batch while "
        "training, such as by tokenizing before.",
    ),
    advice_on(
        *("host_bound", "loading"),
        "Load ahead: DataLoader(num_workers=4, persistent_workers=True); or make less of each batch while training, "
        "such as by tokenizing before.",
    ),
    advice_on(
        *("straggler host_bound", "pauses unnamed"),
        "profile(with_stack=True) names the function: data, logging, a checkpoint, garbage collection (gc.freeze(), "
        "Megatron-Core manual_gc=True). Do it less often, in another thread, or before the step.",
    ),
    advice_on(
        *("straggler host_bound", "pauses"),
        "Shorten it, or do it less often, in another thread or process, or before the step.",
    ),
)
_STRAGGLERS = (
    advice_on(
        *("straggler", "unknown_rank"),
        "Give the traces of all ranks: only they show which one is late, and why.",
    ),
    advice_on(
        *("straggler", "loads_longer"),
        "See why that rank's data take longer (longer samples, its disk or share of the cores), and load ahead: "
        "more num_workers of its DataLoader, or a larger prefetch_factor.",
    ),
    advice_on(
        *("straggler", "host_late cpu"),
        "Python takes longer there between operators: see what else runs on its cores, and whether they are its own "
        "(taskset, OMP_NUM_THREADS).",
    ),
    advice_on(
        *("straggler", "host_late"),
        "Its host launches too slowly, without long pauses: launch less, as for host_bound (CUDA graphs, fused "
        "optimizers, larger microbatches), and see what else runs on its cores.",
    ),
    advice_on(
        *("straggler", "more_work torchrec"),
        "Balance the embedding tables: torchrec's EmbeddingShardingPlanner with the true pooling_factors in its "
        "ParameterConstraints, or row-wise sharding of the largest.",
    ),
    advice_on(
        *("straggler", "more_work all_to_all"),
        "Balance the tokens over the experts: Megatron-Core moe_router_load_balancing_type, "
        "moe_expert_capacity_factor.",
    ),
    advice_on(
        *("straggler", "more_work"),
        "Balance the work: sequence lengths (packing), layers per pipeline stage, and what one rank alone computes, "
        "such as logging or a loss.",
    ),
    advice_on(
        *("straggler", "slower_kernels all_to_all !torchrec"),
        "Balance the tokens over the experts: Megatron-Core moe_router_load_balancing_type, "
        "moe_expert_capacity_factor.",
    ),
    advice_on(
        *("straggler", "slower_kernels !cpu"),
        "If its batches are as large as the others': compare its clocks, power and temperature (nvidia-smi -q -d "
        "CLOCK,POWER,TEMPERATURE). Else balance them: sequence lengths (packing), tokens per expert.",
    ),
    advice_on(
        *("straggler", "slower_kernels"),
        "If its batches are as large as the others', see what else runs on its cores, and whether they are its own "
        "(taskset, OMP_NUM_THREADS). Else balance them: sequence lengths (packing).",
    ),
    advice_on(
        *("straggler", "cpu"),
        "It does the same work as the others: see what else runs on its cores, and whether they are its own (taskset, "
        "OMP_NUM_THREADS).",
    ),
    advice_on(
        *("straggler", ""),
        "It does the same work as the others: compare its clocks, power and temperature with theirs (nvidia-smi -q -d "
        "CLOCK,POWER,TEMPERATURE), and what else runs on its host.",
    ),
)

_HOST = (
    advice_on(
        *("host_bound", "cpu fused"),
        "It is Python's time between operators: torch.compile, or fewer and larger operators.",
    ),
    advice_on(
        *("host_bound", "cpu"),
        "It is Python's time between operators: torch.compile, or fewer and larger operators, such as optimizers with "
        "fused=True.",
    ),
    advice_on(
        *("host_bound", "megatron"),
        "cuda_graph_impl='transformer_engine' or 'local', or larger microbatches.",
    ),
    advice_on(
        *("host_bound", "fsdp2 fused"),
        "torch.compile each layer before fully_shard, or a larger microbatch: FSDP2 itself takes some milliseconds of "
        "the host per layer and step.",
    ),
    advice_on(
        *("host_bound", "fsdp2"),
        "torch.compile each layer before fully_shard, a larger microbatch, optimizers with fused=True: FSDP2 itself "
        "takes some milliseconds of the host per layer and step.",
    ),
    advice_on(
        *("host_bound", "fused"),
        "Launch less: CUDA graphs (torch.compile(mode='reduce-overhead')), larger microbatches.",
    ),
    advice_on(
        *("host_bound", ""),
        "Launch less: CUDA graphs (torch.compile(mode='reduce-overhead')), optimizers with fused=True, larger "
        "microbatches.",
    ),
    advice_on(
        *("host_sync", "end_of_step"),
        "Nothing, if it is only there for profiling. Else take times with torch.cuda.Event(enable_timing=True), and "
        "read them and the loss a step later.",
    ),
    advice_on(
        *("host_sync", "item"),
        "Don't read values from the GPU in mid-step: keep losses and norms as tensors and read them every N steps, or "
        "copy them with non_blocking=True into pinned memory.",
    ),
    advice_on(
        *("host_sync", "copy"),
        "Copy with non_blocking=True, from and into pinned memory (DataLoader(pin_memory=True)); a copy from pageable "
        "memory makes the host wait.",
    ),
    advice_on(
        *("host_sync", "device_sync megatron"),
        "Megatron-Core synchronises after each batched send and receive: overlap_p2p_comm=True, or "
        "batch_p2p_sync=False; its timers do, too: timing_log_level=0.",
    ),
    advice_on(
        *("host_sync", ""),
        "Take what makes the host wait out of the step: torch.cuda.synchronize(), .item(), nonzero(), histc() and "
        "such; torch.cuda.set_sync_debug_mode('warn') shows most of the places.",
    ),
)

_CONTENTION = (
    advice_on(
        *("contention", "cpu"),
        "gloo computes on the cores that GEMMs use: fewer threads for GEMMs (OMP_NUM_THREADS), or a core for "
        "communication.",
    ),
    advice_on(
        *("contention", "userbuffers"),
        "num_sm, set_sm_margin and use_ce of this operator in the tp_comm_overlap_cfg: overlap-sweep tune measures "
        "them.",
    ),
    advice_on(
        *("contention", "deep_ep megatron"),
        "A smaller moe_flex_dispatcher_num_sms gives DeepEP fewer SMs.",
    ),
    advice_on(
        *("contention", "all_gather fsdp2 fewer"),
        "Fewer SMs for NCCL, while it stays hidden: NCCL_MAX_CTAS={fewer}; or none, within a node: "
        "set_symm_mem_for_comm() with NCCL_CTA_POLICY=2 gathers by copy engines (NCCL 2.28).",
    ),
    advice_on(
        *("contention", "transformer_engine fewer"),
        "Fewer SMs for NCCL, while it stays hidden: NCCL_MAX_CTAS={fewer}; NVTE_EXT_MARGIN_SM=<as many> keeps "
        "Transformer Engine's GEMMs off them.",
    ),
    advice_on(
        *("contention", "fewer"),
        "Fewer SMs for communication, while it stays hidden: NCCL_MAX_CTAS={fewer} (for one group: "
        "ProcessGroupNCCL.Options().config.max_ctas). It takes longer then, so compare step times.",
    ),
    advice_on(
        *("contention", ""),
        "Fewer SMs for communication, while it stays hidden: a smaller NCCL_MAX_CTAS. It takes longer then, so compare "
        "step times.",
    ),
)

_UNEXPLAINED = (
    advice_on(
        *("unexplained", "cudaLaunchHostFunc"),
        "The stream waits until a function of the host returns (cudaLaunchHostFunc): find who puts it there, and "
        "shorten it or move it to a stream that nothing waits for.",
    ),
    advice_on(
        *("unexplained", ""),
        "See what holds the device: other processes that share the GPU (nvidia-smi), or an event of another stream: "
        "record it with torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True).",
    ),
)

ADVICE: Sequence[Advice] = (
    advice_on("none", "", "Nothing: overlap has less than 2% of the step to gain."),
    *(advice_on(*one) for one in BETWEEN_NODES),
    *(_IN_TURN + _WITHOUT_TRAINING + _PAUSES + COMMUNICATION + _STRAGGLERS + _HOST + _CONTENTION + _UNEXPLAINED),
)
"""The first whose needs are met is given."""


IF_CORES_ARE_FREE = " It gains time only if cores are free: gloo computes on those that GEMMs use."


def advice_for(cause: Cause, signs: Mapping[str, str]) -> str:
    """Returns the sentence for a cause; `signs`: roles, collectives, libraries and others of `basis.signs_of`."""
    fits = (advice for advice in ADVICE if cause in advice.causes and all(_holds(need, signs) for need in advice.needs))
    advice = next(fits)
    on_cpu = cause in ("dependency", "issued_late") and "cpu" in signs and advice in OVERLAP
    return advice.sentence.format_map(signs) + (IF_CORES_ARE_FREE if on_cpu else "")


def _holds(need: str, signs: Mapping[str, str]) -> bool:
    return need[1:] not in signs if need.startswith("!") else need in signs
