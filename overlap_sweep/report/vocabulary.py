"""What columns mean, by name: one name is one idea in all tables. A table says it itself only where it means more."""

from __future__ import annotations

_POINTS = {
    "point": "Name of the run directory that was measured.",
    "directory": "Path of the run directory, relative to the analysed one.",
    "status": "ok, failed, timeout, skipped (cannot run here) or missing (no result was written).",
    "error": "Why the point has no result; empty if it is ok.",
    "launch_bound": "The CPU enqueued work slower than the GPU ran it: times say nothing about the GPU.",
    "chosen": "The setting that the analysis recommends among those it was compared with.",
    "reason": "Why this setting was chosen, in words.",
    "proven": "The choice was measured again, on what it was chosen for, and held.",
    "relative_error": "Largest difference of any tensor from the reference result, over its largest magnitude.",
    "repeats": "How many timed repeats time_us is the median of.",
    "measurements": "How many points, or measurements in a store, the row was made of.",
}
_CONFIGURATION = {
    "model": "Name of the model whose sizes were used.",
    "num_layers": "How many transformer layers were trained.",
    "tokens": "Tokens of one iteration, before they are divided among ranks.",
    "precision": "Number format of the GEMMs: fp32, bf16, fp16 or an FP8 recipe.",
    "device": "Name of the GPU, or cpu.",
    "backend": "Library that runs the layer and overlaps its communication, such as torch or transformer_engine.",
    "tp_size": "Number of tensor-parallel ranks.",
    "dp_size": "Number of data-parallel ranks.",
    "ranks": "Number of ranks, all of them data parallel.",
    "num_replicas": "Number of data-parallel replicas; each has tp_size ranks.",
    "operator": "Linear operator of the transformer layer: qkv, proj, fc1 or fc2.",
    "phase": "GEMM of the operator: fprop (forward), dgrad (input gradient) or wgrad (weight gradient).",
    "pass": "fwd (forward) or bwd (backward: dgrad and wgrad, which can only be timed together); all is both.",
    "slot": "Operator and phase as Transformer Engine names them, such as fc1_dgrad.",
    "setting": "Settings that differ from the defaults, in short.",
    "method": "How the slot is overlapped: none, bulk, ring_exchange or pipeline.",
    "num_sm": "Streaming multiprocessors that communication kernels occupy.",
    "aggregate": "A ring exchange sends two chunks at a time.",
    "num_splits": "Chunks that a pipeline cuts the GEMM into.",
    "cga_size": "Thread blocks in a cluster of the communication kernel.",
    "set_sm_margin": "The GEMM leaves num_sm multiprocessors free for communication.",
    "use_ce": "The copy engines move the data instead of multiprocessors.",
    "atomic_gemm": "One GEMM signals finished chunks through atomics, instead of a GEMM per chunk.",
    "fp8_buf": "Data is communicated in FP8.",
    "kernel": "Collective and GEMM that are computed together: ag_gemm, gemm_rs or gemm_ar.",
    "m": "Rows of the whole GEMM's output, over all ranks: tokens.",
    "n": "Columns of the whole GEMM's output, over all ranks.",
    "k": "Inner dimension of the whole GEMM, over all ranks.",
    "implementation": "Name of the backend's implementation of this kernel.",
    "impl": "Training stack: autotp, fsdp_dtensor, async_tp or megatron.",
    "batch_size": "Sequences or samples of one micro batch on one data-parallel rank.",
    "gradient_accumulation": "Micro batches of one optimizer step.",
    "gradient_accumulation_steps": "Micro batches of one optimizer step.",
    "seq_length": "Tokens of one sequence.",
    "kind": "Part of the transformer that was measured, such as transformer_layer.",
    "attention_backend": "Who computed attention, such as flash or fused; empty without attention.",
    "variant": "Overlap configuration of the layer: none, default, floor, a method, or a file.",
    "direction": "Where the copies go: device_to_device, device_to_host, host_to_device or peer.",
    "parameters": "Parameters of the whole model.",
    "samples_per_step": "Samples that all ranks together process in one step.",
}
_TIMES = {
    "time_us": "Measured time with this setting: median of the repeats, in each of which the slowest rank counts.",
    "noise_us": "Half-width of the 95 % confidence interval of time_us; smaller differences are ties.",
    "q1_us": "First quartile of the repeats.",
    "q3_us": "Third quartile of the repeats.",
    "none_us": "Time of the same work without overlap: communication, then computation.",
    "floor_us": "Time of the same computation without any communication: what perfect overlap would take.",
    "default_us": "Time under the overlap that the library chooses by itself.",
    "tp1_us": "Time of the whole, unsharded operator on one rank.",
    "host_us": "Time that the CPU takes to enqueue the step.",
    "comm_only_us": "Time of the communication alone.",
    "fwd_us": "Time of the forward pass.",
    "bwd_us": "Time of the backward pass.",
    "optimizer_us": "Time of the optimizer's step; empty if there is none.",
    "us_per_sample": "time_us over the samples of one step: what settings of different batch sizes are compared by.",
    "speedup": "none_us / time_us: above 1 overlap is faster than no overlap.",
    "hidden_fraction": "(none_us - time_us) / (none_us - floor_us): 1 hides all communication, 0 none, negative harms.",
    "hidden_noise": "Half-width of the 95 % confidence interval of hidden_fraction.",
    "exposed_comm_us": "Time in which communication runs with no computation beside it.",
    "overlap_ratio": "Time in which GEMMs and communication run at once, over the shorter of the two.",
    "ratio": "time_us over that of the reference: below 1 is faster.",
    "ratio_low": "Lower end of the ratio's 95 % confidence interval.",
    "ratio_high": "Upper end of the ratio's 95 % confidence interval.",
    "none_ratio": "none_us over that of the reference: how much the machine itself changed.",
    "floor_ratio": "floor_us over that of the reference: how much the GEMMs themselves changed.",
    "verdict": "faster, slower, or same where the difference is within the noise.",
    "peak_memory_gb": "Most memory that PyTorch's allocator held at once, on the rank with the most; 10^9 bytes.",
    "tflops": "GEMM operations of one rank over time_us.",
    "tflops_per_gpu": "Model FLOPs of a step over its time and the number of GPUs.",
    "samples_per_s": "Samples of all ranks together per second.",
    "tokens_per_s": "Tokens of all ranks together per second.",
    "tokens_per_s_per_gpu": "Tokens per second, over the number of GPUs.",
    "fwd_fraction": "Share of the step that the forward passes take.",
    "bwd_fraction": "Share of the step that the backward passes take.",
    "optimizer_fraction": "Share of the step that the optimizer takes, gradient clipping included.",
}
_TRACES = {
    "file": "Path of the trace.",
    "rank": "Rank that recorded the trace; empty for a median over ranks.",
    "iteration": "Number of the profiled iteration: N of ProfilerStep#N, or counted from 0.",
    "iterations": "Number of iterations that the medians are over.",
    "startup": "The iteration is start-up, slower than the later ones, and left out of medians.",
    "startup_iterations": "Number of iterations that are left out as start-up.",
    "span_us": "From the start of the first kernel to the end of the last.",
    "total_span_us": "fwd_span_us + bwd_span_us, without the pause between the passes.",
    "total_overlap_ratio": "Overlap of both passes over the shorter of their summed GEMM and communication times.",
    "gemm_us": "Time in which a GEMM runs; GEMMs side by side count once.",
    "comm_us": "Time in which a communication kernel or copy between GPUs runs; side by side they count once.",
    "wait_us": "Time in which kernels wait for other ranks without moving data.",
    "overlap_us": "Time in which GEMMs and communication run at once.",
    "idle_us": "Part of the span in which nothing runs.",
    "num_gemm_events": "Number of GEMM kernels.",
    "num_comm_events": "Number of communication kernels and copies between GPUs.",
    "num_wait_events": "Number of kernels that wait for other ranks.",
    "num_compute_events": "Number of kernels that compute something other than a GEMM.",
    "num_events": "Number of kernels and copies in the part.",
    "by": "What the row is a part by: class, kernel or stream.",
    "library": "Library whose kernels these are, such as cublas or nccl.",
    "name": "Name of the class, kernel or stream.",
    "busy_us": "Time in which the part runs; what runs side by side counts once.",
    "total_us": "Sum of the durations of the part's kernels.",
    "alone_us": "Part of busy_us in which no other part runs.",
    "num_ranks": "Number of ranks that have a trace.",
    "world_size": "Number of ranks of the run, as the traces say.",
    "missing": "Ranks without a trace.",
    "slowest_rank": "Rank with the longest span.",
    "slowest_us": "Span of the slowest rank.",
    "fastest_rank": "Rank with the shortest span.",
    "fastest_us": "Span of the fastest rank.",
    "skew_us": "slowest_us less fastest_us.",
    "run": "Run that the traces or logs belong to: what their names have in common.",
}
_COMPARISONS = {
    "dataset": "Label of the directory that is compared.",
    "reference": "Label of what it is compared with.",
    "quantity": "Name of what is compared, with its unit.",
    "value": "Median of the quantity, in its unit.",
    "noise": "Half-width of the 95 % confidence interval of the value, in its unit.",
    "difference": "value less reference_value, in the quantity's unit.",
    "difference_us": "busy_us less reference_busy_us.",
    "ratio_noise": "Half-width of the 95 % confidence interval of the ratio.",
    "change": "faster, slower, same, appeared or disappeared.",
    "driver": "Version of the GPU driver.",
    "torch": "Version of PyTorch.",
    "transformer_engine": "Version of Transformer Engine.",
    "megatron_core": "Version of Megatron-Core.",
    "nccl": "Version of NCCL.",
    "hosts": "Names of the machines that measured it.",
    "first": "When the first of the measurements began, UTC.",
    "last": "When the last of the measurements began, UTC.",
    "changed": "What differs from the environment before, such as a library's version.",
}
EXPLAINED = {**_POINTS, **_CONFIGURATION, **_TIMES, **_TRACES, **_COMPARISONS}
_PREFIXES = {
    "reference_": "Of the reference: {}",
    "fwd_": "Forward pass, from the trace: {}",
    "bwd_": "Backward pass, from the trace: {}",
}
UNITS = {
    **{"_us": "us", "us_per_sample": "us", "_gb": "GB", "_mb": "MiB", "fraction": "fraction", "mfu": "fraction"},
    **{"ratio": "ratio", "ratio_low": "ratio", "ratio_high": "ratio", "ratio_noise": "ratio", "speedup": "ratio"},
    **{"hidden_noise": "fraction", "_error": "fraction", "_bound": "fraction", "gain": "fraction"},
    **{"loss_difference": "fraction", "loss": "nats", "tokens_per_s_per_gpu": "1/s", "samples_per_s": "1/s"},
    **{"tokens_per_s": "1/s", "num_events": "count"},
    **{"tflops": "TFLOP/s", "tflops_per_gpu": "TFLOP/s", "tflops_alone": "TFLOP/s", "tflops_overlapped": "TFLOP/s"},
    **{"gb_per_s": "GB/s", "gb_per_s_alone": "GB/s", "gb_per_s_overlapped": "GB/s"},
    **dict.fromkeys(("value", "difference", "noise"), "the quantity's"),
}
"""By the end of a column's name."""


def explained(name: str) -> str:
    """Returns what a column of this name means; empty if only its own table can say it."""
    if known := EXPLAINED.get(name):
        return known
    for prefix, words in _PREFIXES.items():
        if inner := EXPLAINED.get(name.removeprefix(prefix)) if name.startswith(prefix) else None:
            return words.format(inner[0].lower() + inner[1:] if inner.split()[0].istitle() else inner)
    return ""


def unit(name: str, kind: str) -> str:
    """Returns the unit of a column of numbers, by its name; of others its kind."""
    if kind != "number":
        return kind
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else kind
