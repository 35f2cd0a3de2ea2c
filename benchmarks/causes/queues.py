"""Communication that is launched beside GEMMs, and gets in their way or they in its."""

import torch.distributed as dist

from causes.scenario import Job, Step, scenario


@scenario(
    "queue_order",
    name="manual_connections_1",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    mends={"manual_connections_32": "CUDA_DEVICE_MAX_CONNECTIONS=32"},
)
@scenario(
    "none",
    "contention",
    name="manual_connections_32",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
)
def manual_connections(job: Job) -> Step:
    """Sums of a layer's gradients on a side stream, launched after GEMMs that don't need them; the next layer does."""
    # Six GEMMs of 0.42 ms, 256 MB in 1.35 ms: hidden, unless the sum stands behind all six in a single hardware queue.
    rows, size, layers, products = (8192, 4096, 4, 6) if job.on_gpu else (512, 512, 3, 6)
    x, w = job.random(rows, size), job.random(size, size)
    gradients = [job.random(128_000_000 if job.on_gpu else 500_000) for _ in range(layers)]
    side, group, module = job.module.Stream(), job.group("DP"), job.module

    def step() -> None:
        for gradient in gradients:
            main = module.current_stream()
            gradient.mul_(0.5)
            ready = main.record_event()
            for _ in range(products):
                x @ w
            with module.stream(side):
                side.wait_event(ready)
                dist.all_reduce(gradient, group=group)
            main.wait_stream(side)

    return step


# NCCL's thread blocks keep 64 of 132 multiprocessors: a GEMM next to them takes about twice as long.
@scenario(
    "contention",
    name="many_ctas",
    devices=("cuda",),
    environment={"NCCL_MIN_CTAS": "64", "NCCL_MAX_CTAS": "64"},
    mends={"fewer_ctas": "NCCL_MAX_CTAS=16 instead of 64", "few_ctas": "NCCL_MAX_CTAS=8 instead of 64"},
)
@scenario("none", "contention", name="fewer_ctas", devices=("cuda",), environment={"NCCL_MAX_CTAS": "16"})
# With 8 the all-reduce takes longer than the GEMMs beside it.
@scenario("bandwidth", "contention", name="few_ctas", devices=("cuda",), environment={"NCCL_MAX_CTAS": "8"})
# gloo's threads and both ranks' GEMMs share the cores.
@scenario("contention", name="gloo_beside_products", devices=("cpu",))
def products_beside_sums(job: Job) -> Step:
    """All-reduces of gradients beside GEMMs that take longer, and the same GEMMs alone in the same step."""
    # An all-reduce of 400 MB takes 1.3 ms, three GEMMs beside it 2.3 ms without it.
    rows, size, rounds, beside, alone = (16384, 4096, 3, 3, 1) if job.on_gpu else (512, 512, 3, 8, 8)
    x, w = job.random(rows, size), job.random(size, size)
    gradients = [job.random(200_000_000 if job.on_gpu else 2_000_000) for _ in range(rounds)]
    group = job.group("DP")

    def step() -> None:
        for gradient in gradients:
            gradient.mul_(0.5)
            work = dist.all_reduce(gradient, group=group, async_op=True)
            for _ in range(beside):
                x @ w
            work.wait()
            for _ in range(alone):
                x @ w

    return step
