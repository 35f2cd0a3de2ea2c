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
    def __init__(self, rank: int | None = 0, world_size: int = 2) -> None:
        self.info = {"rank": rank, "world_size": world_size} if rank is not None else {}
        self.events: list[dict[str, Any]] = []
        self._correlation = 100

    def add(self, cat: str, name: str, start: float, end: float, pid: int, tid: int, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": pid, "tid": tid}
        self.events.append({**event, "args": args})

    def step(self, number: int, start: float, end: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, end, 100, HOST)

    def backward(self, start: float, end: float, node: str = "MmBackward0") -> None:
        self.add("cpu_op", f"autograd::engine::evaluate_function: {node}", start, end, 100, AUTOGRAD)

    def function(self, name: str, start: float, end: float) -> None:
        self.add("cpu_op", name, start, end, 100, HOST, **{"Sequence number": 7, "Fwd thread id": 0})

    def operator(self, name: str, start: float, end: float, **args: Any) -> None:
        self.add("cpu_op", name, start, end, 100, HOST, **args)

    def annotation(self, name: str, start: float, end: float, **args: Any) -> None:
        self.add("user_annotation", name, start, end, 100, HOST, **args)

    def optimizer(self, start: float, end: float) -> None:
        self.annotation("Optimizer.step#AdamW.step", start, end)

    def python(self, name: str, start: float, end: float) -> None:
        self.add("python_function", name, start, end, 100, HOST)

    def copy(self, start: float, end: float) -> None:
        self._correlation += 1
        self.add("cuda_runtime", "cudaMemcpyAsync", start - 4, start, 100, HOST, correlation=self._correlation)
        self.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start, end, 0, SIDE, correlation=self._correlation)

    def wait(self, start: float, end: float, name: str = "cudaStreamSynchronize") -> None:
        self.add("cuda_runtime", name, start, end, 100, HOST, correlation=0)

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
        at = start - LEAD if launch is None else launch
        self.add("cuda_runtime", "cudaLaunchKernel", at, at + 4, 100, thread, correlation=self._correlation)
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

    def write(self, path: Path) -> Path:
        """Writes the trace, compressed if the path ends in .gz."""
        content = json.dumps({"distributedInfo": self.info, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        return path

    def facts(self, directory: Path) -> RankFacts:
        path = self.write(directory / f"trace_rank{self.info.get('rank', 0)}.json")
        return facts_of(read_trace(path))


def diagnosed(directory: Path, *ranks: Timeline) -> Diagnosis:
    return diagnosis_of("made", [rank.facts(directory) for rank in ranks])


def findings(directory: Path, *ranks: Timeline) -> dict[str, Finding]:
    """Returns the largest finding of each cause."""
    found: dict[str, Finding] = {}
    for finding in diagnosed(directory, *ranks).findings:
        found.setdefault(finding.cause, finding)
    return found
