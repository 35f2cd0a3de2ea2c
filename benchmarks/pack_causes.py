"""Packs recordings of planted causes or effects as a small archive for the tests:

    python benchmarks/pack_causes.py RECORDINGS ARCHIVE [--light]

The first entry of an archive is scenarios.json; reading it does not need the rest. Traces lie uncompressed, since xz
finds what many of them share. They are as recorded, except that some of what says nothing of time is left out: arrows
between launches and kernels, questions to the runtime that launch nothing, numbers of the profiler's own, and shapes
but those of collectives. --light also leaves out operators within operators and calls of the runtime that launch
nothing: what ran, and when it was launched, stays.
"""

import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DESCRIBED = "scenarios.json"
DICTIONARY = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 128 << 20}]
ARROWS = ("s", "t", "f")
QUESTIONS = ("cudaEventQuery", "cudaStreamIsCapturing", "cudaThreadExchangeStreamCaptureMode", "cudaGetFuncBySymbol")
SHAPES = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
COLLECTIVES = ("c10d::", "gloo:", "nccl:", "record_param_comms")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OCCUPANCY = (
    "registers per thread",
    "shared memory",
    "blocks per SM",
    "warps per SM",
    "est. achieved occupancy %",
)
OWN_NUMBERS = ("Record function id", "Ev Idx", "cbid", "queued", "context")


def pack(recordings: Path, archive: Path, *, light: bool) -> None:
    described = [
        json.loads(path.read_text())
        for name in ("scenario.json", "recorded.json")
        for path in sorted(recordings.glob(f"*/{name}"))
    ]
    with lzma.open(archive, "w", filters=DICTIONARY) as compressed, tarfile.open(fileobj=compressed, mode="w") as tar:
        _add(tar, DESCRIBED, json.dumps(described, indent=1).encode())
        for name, content in _traces(recordings, [each["name"] for each in described], light=light):
            _add(tar, name, content)


def _traces(recordings: Path, names: list[str], *, light: bool) -> Iterator[tuple[str, bytes]]:
    for name in names:
        for path in sorted((recordings / name).glob("trace_rank*.json*")):
            trace: dict[str, Any] = json.loads(_text(path))
            trace.pop("traceName", None)
            trace["traceEvents"] = [_shortened(event) for event in trace["traceEvents"] if _says_something(event)]
            if light:
                trace["traceEvents"] = _light(trace["traceEvents"])
            yield f"{name}/{path.name.removesuffix('.gz')}", json.dumps(trace, separators=(",", ":")).encode()


def _text(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _says_something(event: dict[str, Any]) -> bool:
    return event.get("ph") not in ARROWS and event.get("name") not in QUESTIONS


def _light(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    launched = {event["args"].get("correlation") for event in events if event.get("cat") in DEVICE}

    def kept(event: dict[str, Any]) -> bool:
        category, args = event.get("cat", ""), event.get("args", {})
        if category.startswith("cuda_"):
            return args.get("correlation") in launched
        return category != "cpu_op" or "Sequence number" in args or not event["name"].startswith("aten::")

    for event in events:
        if event.get("cat") == "kernel":
            event["args"] = {name: value for name, value in event["args"].items() if name not in OCCUPANCY}
    return [event for event in events if kept(event)]


def _shortened(event: dict[str, Any]) -> dict[str, Any]:
    if "args" in event:
        dropped = OWN_NUMBERS if event.get("name", "").startswith(COLLECTIVES) else OWN_NUMBERS + SHAPES
        event["args"] = {name: value for name, value in event["args"].items() if name not in dropped}
    return event


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]), light="--light" in sys.argv[3:])
