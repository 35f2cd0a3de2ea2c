"""Makes Kineto traces of a rank from a few lines: steps, passes, kernels with their launches, collectives and waits.

Times are microseconds. A kernel is launched `LEAD` before it starts by default: the host is ahead.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.diagnosis import Diagnosis, Finding
from overlap_sweep.diagnosis.facts import RankFacts, facts_of
from overlap_sweep.diagnosis.findings import diagnosis_of
from overlap_sweep.trace.kineto import read_trace

LEAD = 500
COMPUTE, SIDE, NCCL = 7, 13, 17
"""Streams: of computation, of copies into buffers, of communication."""
HOST, AUTOGRAD = 1, 2
"""Threads."""
NAMES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}


class Timeline:
    def __init__(self, rank: int | None = 0, world_size: int = 2, path: Path = Path("trace.json")) -> None:
        self.path = path
        self.info = {"rank": rank, "world_size": world_size} if rank is not None else {}
        self.events: list[dict[str, Any]] = []
        self._correlation = 100

    def add(self, cat: str, name: str, start: float, end: float, pid: int, tid: int, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": pid, "tid": tid}
        self.events.append({**event, "args": args})

    def step(self, number: int, start: float, end: float) -> None:
        self.annotation(f"ProfilerStep#{number}", start, end)

    def backward(self, start: float, end: float, node: str = "MmBackward0", thread: int = AUTOGRAD) -> None:
        self.operator(f"autograd::engine::evaluate_function: {node}", start, end, thread)

    def function(self, name: str, start: float, end: float, thread: int = HOST) -> None:
        """An operator that autograd numbered, as it numbers those of a forward computation."""
        self.operator(name, start, end, thread, **{"Sequence number": 7, "Fwd thread id": 0})

    def operator(self, name: str, start: float, end: float, thread: int = HOST, **args: Any) -> None:
        self.add("cpu_op", name, start, end, 100, thread, **args)

    def annotation(self, name: str, start: float, end: float, thread: int = HOST, **args: Any) -> None:
        self.add("user_annotation", name, start, end, 100, thread, **args)

    def optimizer(self, start: float, end: float) -> None:
        self.annotation("Optimizer.step#AdamW.step", start, end)

    def python(self, name: str, start: float, end: float) -> None:
        self.add("python_function", name, start, end, 100, HOST)

    def copy(self, start: float, end: float) -> None:
        self._correlation += 1
        self.launch(start - 4, self._correlation, name="cudaMemcpyAsync")
        self.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start, end, 0, SIDE, correlation=self._correlation)

    def wait(self, start: float, end: float, name: str = "cudaStreamSynchronize") -> None:
        self.add("cuda_runtime", name, start, end, 100, HOST, correlation=0)

    def launch(self, at: float, correlation: int, thread: int = HOST, name: str = "cudaLaunchKernel") -> None:
        self.add("cuda_runtime", name, at, at + 4, 100, thread, correlation=correlation)

    def on_device(
        self, name: str, start: float, end: float, launch: int | None = None, stream: int = COMPUTE, cat: str = "kernel"
    ) -> None:
        """Something with the correlation of a launch that is added apart, or without one."""
        self.add(cat, name, start, end, 0, stream, correlation=launch)

    def work(self, name: str, at: float, start: float | None = None, end: float | None = None, **given: int) -> None:
        """A kernel that is launched `at`: it starts a millisecond later and takes 5 us by default."""
        start = at + 1000 if start is None else start
        self.kernel(start, start + 5 if end is None else end, name, at, **given)

    def kernel(
        self,
        start: float,
        end: float,
        name: str = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT",
        launch: float | None = None,
        stream: int = COMPUTE,
        thread: int = HOST,
        **args: Any,
    ) -> None:
        self._correlation += 1
        self.launch(start - LEAD if launch is None else launch, self._correlation, thread)
        self.add("kernel", name, start, end, 0, stream, correlation=self._correlation, **args)

    def collective(
        self,
        kind: str,
        start: float,
        end: float,
        launch: float | None = None,
        stream: int = NCCL,
        thread: int = HOST,
        elements: int = 1 << 20,
        group: str = "1",
        ranks: Sequence[int] = (0, 1),
        blocks: int = 24,
    ) -> None:
        shard = elements // len(ranks)
        self.kernel(
            start,
            end,
            f"ncclDevKernel_{kind}",
            launch,
            stream,
            thread,
            **{
                "grid": [blocks, 1, 1],
                "block": [544, 1, 1],
                "Collective name": NAMES[kind],
                "In msg nelems": shard if kind == "all_gather" else elements,
                "Out msg nelems": shard if kind == "reduce_scatter" else elements,
                "dtype": "BFloat16",
                "Group size": len(ranks),
                "Process Group Name": group,
                "Process Group Description": "",
                "Process Group Ranks": str(list(ranks)),
            },
        )

    def write(self, path: Path | None = None, base_time_ns: int = 0) -> Path:
        """Writes the trace, compressed if the path ends in .gz."""
        path = path or self.path
        document = {"distributedInfo": self.info, "baseTimeNanoseconds": base_time_ns, "traceEvents": self.events}
        content = json.dumps(document).encode()
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        return path

    def facts(self, directory: Path) -> RankFacts:
        path = self.write(directory / f"trace_rank{self.info.get('rank', 0)}.json")
        return facts_of(read_trace(path))


def one_step(start: float, end: float) -> Timeline:
    made = Timeline()
    made.step(0, start, end)
    return made


def write_trace(path: Path, rank: int | None, gemm_us: list[float], comm_us: float, **kernels: str) -> Path:
    """For each iteration a GEMM of such a length on one stream, and from its start a communication on another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Timeline(rank)
    for number, length_us in enumerate(gemm_us):
        at = number * 1000.0
        made.step(number, at, at + 900)
        made.kernel(at + 5, at + 5 + length_us, kernels.get("gemm", "nvjet_tst_a"), launch=at + 1)
        comm = kernels.get("comm", "ncclDevKernel_AllGather_RING_LL()")
        made.kernel(at + 5, at + 5 + comm_us, comm, launch=at + 1, stream=23)
    return made.write(path)


def diagnosed(directory: Path, *ranks: Timeline) -> Diagnosis:
    return diagnosis_of("made", [rank.facts(directory) for rank in ranks])


def findings(directory: Path, *ranks: Timeline) -> dict[str, Finding]:
    """Returns the largest finding of each cause."""
    found: dict[str, Finding] = {}
    for finding in diagnosed(directory, *ranks).findings:
        found.setdefault(finding.cause, finding)
    return found
