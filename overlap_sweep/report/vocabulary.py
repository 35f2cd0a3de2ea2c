"""Explanations and units of columns by name: a name means the same in all tables. A table's own explanation adds to
it."""

from overlap_sweep.diagnosis.causes import CAUSES_IN_WORDS

_POINTS = {
    "point": "Name of the run directory that was measured.",
    "directory": "Path of the run directory, relative to the analysed one.",
    "status": "ok, failed, timeout, skipped (cannot run here) or missing (no result was written).",
    "error": "Why the point has no result; empty if it is ok.",
    "launch_bound": "Whether the CPU enqueued work slower than the GPU ran it; if so, times say nothing about the GPU.",
    "reason": "Why this setting was chosen.",
    "relative_error": "Largest difference of any tensor from the reference result / its largest magnitude.",
    "repeats": "Number of timed repeats; time_us is their median.",
    "measurements": "Number of points (or of measurements in a store) in the row.",
}
_CONFIGURATION = {
    "model": "Name of the model whose sizes were used.",
    "num_layers": "Number of transformer layers that were trained.",
    "tokens": "Tokens of one iteration, before they are divided among ranks.",
    "precision": "Number format of the GEMMs: fp32, bf16, fp16 or a recipe for FP8 or FP4.",
    "device": "Name of the GPU, or cpu.",
    "backend": "Library that runs the layer and overlaps its communication, such as torch or transformer_engine.",
    "tp_size": "Number of tensor-parallel ranks.",
    "dp_size": "Number of data-parallel ranks.",
    "ranks": "Number of ranks, all of them data parallel.",
    "nodes": "Number of nodes (machines) that the ranks ran on, equally many on each.",
    "process_wide": "Unusual settings of whole processes: CUDA's connections, cuBLASMp.",
    "num_replicas": "Number of data-parallel replicas; each has tp_size ranks.",
    "operator": "Linear operator of the transformer layer: qkv, proj, fc1 or fc2.",
    "phase": "GEMM of the operator: fprop (forward), dgrad (input gradient) or wgrad (weight gradient).",
    "pass": "fwd (forward) or bwd (backward: dgrad and wgrad, which can only be timed together); all is both.",
    "slot": "Operator and phase as Transformer Engine names them, such as fc1_dgrad.",
    "setting": "Settings that differ from the defaults, in short.",
    "method": "How the slot is overlapped: none, bulk, ring_exchange or pipeline.",
    "num_sm": "Streaming multiprocessors that communication kernels occupy.",
    "aggregate": "Whether a ring exchange sends two chunks at a time.",
    "num_splits": "Chunks that a pipeline splits the GEMM into.",
    "cga_size": "Thread blocks in a cluster of the communication kernel.",
    "set_sm_margin": "Whether the GEMM leaves num_sm multiprocessors free for communication.",
    "use_ce": "Whether copy engines move the data instead of multiprocessors.",
    "atomic_gemm": "Whether one GEMM signals finished chunks through atomics, instead of one GEMM per chunk.",
    "fp8_buf": "Whether data is communicated in FP8.",
    "comm_priority": "Priority of the streams that communicate; lower numbers come first.",
    "gemm_priority": "Priority of the streams of the GEMMs; lower numbers come first.",
    "pipeline_rs_overlap_first_gemm": "Whether a pipeline enqueues each GEMM before the communication of the last one.",
    "kernel": "GEMM with a collective: ag_gemm, gemm_rs or gemm_ar.",
    "m": "Rows of the whole GEMM's output, over all ranks: tokens.",
    "n": "Columns of the whole GEMM's output, over all ranks.",
    "k": "Inner dimension of the whole GEMM, over all ranks.",
    "implementation": "Name of the backend's implementation of this kernel.",
    "impl": "Training stack: autotp, fsdp_dtensor, async_tp or megatron.",
    "batch_size": "Sequences or samples of one micro batch on one data-parallel rank.",
    "gradient_accumulation_steps": "Micro batches of one optimizer step.",
    "seq_length": "Tokens of one sequence.",
    "kind": "Part of the transformer that was measured, such as transformer_layer.",
    "attention_backend": "Kernel of the attention, such as flash or fused; empty without attention.",
    "variant": "Overlap configuration of the layer: none, default, floor, a method, or a file.",
    "direction": "Where the copies go: device_to_device, device_to_host, host_to_device or peer.",
    "parameters": "Parameters of the whole model.",
    "samples_per_step": "Samples of all ranks in one step.",
}
_TIMES = {
    "time_us": "Time with this setting: median of the repeats; the slowest rank counts in each.",
    "noise_us": "Half-width of the 95 % confidence interval of time_us; smaller differences are ties.",
    "q1_us": "First quartile of the repeats.",
    "q3_us": "Third quartile of the repeats.",
    "none_us": "Time of the same work with no overlap: communication, then computation.",
    "floor_us": "Time of the same computation with no communication, as under perfect overlap.",
    "default_us": "Time with the library's default overlap.",
    "tp1_us": "Time of the whole, unsharded operator on one rank.",
    "host_us": "Time that the CPU takes to enqueue the step.",
    "comm_only_us": "Time of the communication alone.",
    "fwd_us": "Time of the forward pass.",
    "both_us": "Time of the pairs of a micro batch's backward and the next one's forward; empty if there is only one.",
    "bwd_us": "Time of the backward pass.",
    "optimizer_us": "Time of the optimizer's step; empty if there is none.",
    "us_per_sample": "time_us / samples of one step; compares settings of different batch sizes.",
    "speedup": "none_us / time_us: above 1 overlap is faster than no overlap.",
    "hidden_fraction": "(none_us - time_us) / (none_us - floor_us): 1 hides all communication, 0 none, negative harms.",
    "hidden_noise": "Half-width of the 95 % confidence interval of hidden_fraction.",
    "exposed_comm_us": "Time in which communication runs while nothing computes.",
    "overlap_ratio": "Time in which GEMMs and communication run at the same time / the shorter of the two times.",
    "ratio": "time_us / time_us of the reference; below 1 is faster.",
    "ratio_low": "Lower end of the ratio's 95 % confidence interval.",
    "ratio_high": "Upper end of the ratio's 95 % confidence interval.",
    "none_ratio": "none_us / none_us of the reference: how much the machine itself changed.",
    "floor_ratio": "floor_us / floor_us of the reference: how much the GEMMs themselves changed.",
    "verdict": "faster, slower, or same (the difference is within the noise).",
    "peak_memory_gb": "Most memory that PyTorch's allocator held at once, on the rank with the most; 10^9 bytes.",
    "tflops": "GEMM operations of one rank / time_us.",
    "tflops_per_gpu": "Model FLOPs of a step / its time / number of GPUs.",
    "samples_per_s": "Samples per second of all ranks.",
    "tokens_per_s": "Tokens per second of all ranks.",
    "tokens_per_s_per_gpu": "Tokens per second / number of GPUs.",
    "fwd_fraction": "Share of the step that the forward passes take.",
    "bwd_fraction": "Share of the step that the backward passes take.",
    "optimizer_fraction": "Share of the step that the optimizer takes, gradient clipping included.",
}
_TRACES = {
    "file": "Path of the trace.",
    "rank": "Rank that recorded the trace; empty for a median over ranks.",
    "iteration": "Number of the profiled iteration: N of ProfilerStep#N, or counted from 0.",
    "startup": "Whether the iteration is start-up: slower than later ones, and left out of medians.",
    "startup_iterations": "Number of iterations that are left out as start-up.",
    "span_us": "Time from the start of the first kernel to the end of the last.",
    "total_span_us": "fwd_span_us + bwd_span_us, without the pause between the passes.",
    "total_overlap_ratio": "Overlap of both passes / the shorter of their summed GEMM and communication times.",
    "gemm_us": "Time in which a GEMM runs; GEMMs at the same time count once.",
    "comm_us": "Time in which a communication kernel or a copy between GPUs runs; at the same time they count once.",
    "wait_us": "Time in which kernels wait for other ranks without moving data.",
    "overlap_us": "Time in which GEMMs and communication run at the same time.",
    "idle_us": "Part of the span in which nothing runs.",
    "num_gemm_events": "Number of GEMM kernels.",
    "num_comm_events": "Number of communication kernels and copies between GPUs.",
    "num_wait_events": "Number of kernels that wait for other ranks.",
    "num_compute_events": "Number of kernels that compute something other than a GEMM.",
    "num_events": "Number of kernels and copies in the part.",
    "by": "Grouping of the row: class, kernel or stream.",
    "library": "Library of the kernels, such as cublas or nccl.",
    "name": "Name of the class, kernel or stream.",
    "busy_us": "Time in which the part runs; kernels at the same time count once.",
    "total_us": "Sum of the durations of the part's kernels.",
    "alone_us": "Part of busy_us in which no other part runs.",
    "num_ranks": "Number of ranks that have a trace.",
    "world_size": "Number of ranks of the run, from the traces.",
    "missing": "Ranks without a trace.",
    "slowest_rank": "Rank with the longest span.",
    "slowest_us": "Span of the slowest rank.",
    "fastest_rank": "Rank with the shortest span.",
    "fastest_us": "Span of the fastest rank.",
    "skew_us": "slowest_us - fastest_us.",
    "cause": "Main cause of exposed communication, the one that costs most: none (less than 2 % of the step), "
    f"{CAUSES_IN_WORDS}.",
    "cause_lost_us": "Time per profiled step that fixing this cause alone could gain at most.",
    "cause_share": "cause_lost_us / time of the profiled step.",
    "cause_try": "Sentence with the setting to change; empty if there is none.",
    "within_node_us": "Communication time per profiled step within nodes, with the wait for the last rank, on the rank "
    "that communicates most between nodes; empty on a single node, or if the traces don't name all process groups.",
    "between_nodes_us": "The same between nodes.",
    "within_node_gb_s": "Bus bandwidth within nodes, as nccl-tests defines it, without the wait for the last rank; "
    "empty if the traces have no sizes.",
    "between_nodes_gb_s": "The same between nodes, of each rank.",
    "run": "Run of the traces or logs: the common part of their names.",
}
_COMPARISONS = {
    "dataset": "Label of the compared directory.",
    "reference": "Label of the directory that it is compared with.",
    "quantity": "Name of the compared quantity, with its unit.",
    "value": "Median of the quantity, in its unit.",
    "noise": "Half-width of the 95 % confidence interval of the value, in its unit.",
    "difference": "value - reference_value, in the quantity's unit.",
    "difference_us": "busy_us - reference_busy_us.",
    "ratio_noise": "Half-width of the 95 % confidence interval of the ratio.",
    "change": "faster or slower (in every iteration than in any of the reference), same, appeared or disappeared. "
    "Between ranks of one run communication that takes longer waits, for the other rank, which is awaited.",
    "driver": "Version of the GPU driver.",
    "torch": "Version of PyTorch.",
    "transformer_engine": "Version of Transformer Engine.",
    "megatron_core": "Version of Megatron-Core.",
    "nccl": "Version of NCCL.",
    "hosts": "Names of the machines that measured it.",
    "first": "Start of the first measurement, UTC.",
    "last": "Start of the last measurement, UTC.",
    "changed": "What differs from the previous environment, such as a library version.",
}
EXPLAINED = {**_POINTS, **_CONFIGURATION, **_TIMES, **_TRACES, **_COMPARISONS}
_PREFIXES = {
    "reference_": "For the reference: {}",
    "fwd_": "Forward pass, from the trace: {}",
    "bwd_": "Backward pass, from the trace: {}",
}
_ENDS = {
    "us": "_us us_per_sample",
    "ms": "_ms",
    "GB": "_gb",
    "MiB": "_mb",
    "fraction": "fraction mfu hidden_noise gain_noise _error _bound gain cost hidden share loss_difference",
    "ratio": "ratio ratio_low ratio_high ratio_noise speedup slowdown",
    "nats": "loss loss_of_step",
    "1/s": "tokens_per_s_per_gpu samples_per_s tokens_per_s units_per_s",
    "count": "calls num_events samples_per_step tokens_per_step",
    "TFLOP/s": "tflops tflops_per_gpu tflops_alone tflops_overlapped",
    "GB/s": "_gb_s gb_per_s gb_per_s_alone gb_per_s_overlapped",
    "MHz": "_mhz",
    "W": "power_w",
    "\N{DEGREE SIGN}C": "temperature_c",
    "dimensionless": "learning_rate grad_norm gradients_norm parameters_norm",
    "the quantity's": "value difference noise",
}
UNITS = {end: unit for unit, ends in _ENDS.items() for end in ends.split()}
"""Units by the end of a column's name."""


def explained(name: str) -> str:
    """Returns the explanation of a column of this name; empty if only its own table explains it."""
    if known := EXPLAINED.get(name):
        return known
    for prefix, words in _PREFIXES.items():
        if inner := EXPLAINED.get(name.removeprefix(prefix)) if name.startswith(prefix) else None:
            return words.format(inner[0].lower() + inner[1:] if inner.split()[0].istitle() else inner)
    return ""


def unit(name: str, kind: str) -> str:
    """Returns the unit of a column of numbers by its name; for others the kind."""
    if kind != "number":
        return kind
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else kind
