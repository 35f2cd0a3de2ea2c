"""Writes traces of torch.profiler as Nsight Systems would have recorded the same events under `emit_nvtx`, with the
tables of NVIDIA's "SQLite Export Schema Reference" (schema 3.25) and payloads as NCCL's nvtx_payload_schemas.h has
them. Public exports of versions 2022.2 to 2026.2 were read by hand when this was written."""

import gzip
import json
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.diagnosis.collectives import element_bytes

Row = dict[str, Any]

MACHINE = 1 << 48
"""The part of globalPid and globalTid above the process."""
PUSH_POP, START_END, DOMAIN = 59, 60, 75

_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "HtoH": 9, "PtoP": 10}
_MEMORY = ["Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static"]
_CALLS = {"allreduce": "AllReduce", "allgather": "AllGather", "_allgather_base": "AllGather"} | {
    "_reduce_scatter_base": "ReduceScatter",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}

TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "META_DATA_CAPTURE": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT, busLocation TEXT, smCount INTEGER",
    "ThreadNames": "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, "
    "globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL, "
    "gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, "
    "blockZ INTEGER NOT NULL, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "value INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
    "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, "
    "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, binaryData TEXT",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, idx INTEGER NOT NULL, "
    "flags INTEGER, type INTEGER, name TEXT, offset INTEGER",
}

_INIT, _MOVE = 16777218, 16777220
SCHEMAS = [
    (_INIT, [(18, "NCCL communicator ID", None), (5, "No. of ranks", 8), (5, "Rank", 12), (5, "CUDA device", 16)]),
    (_MOVE, [(18, "NCCL communicator ID", None), (22, "Message size [bytes]", 8)]),
]


class Export:
    """An export that is written row by row. Tables without rows are left out, as nsys does."""

    def __init__(self, epoch_ns: int) -> None:
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._strings: dict[str, int] = {}
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch_ns)
        for schema, entries in SCHEMAS:
            for idx, (kind, name, offset) in enumerate(entries):
                self.add(
                    "NVTX_PAYLOAD_SCHEMA_ENTRIES",
                    **{"domainId": 1, "schemaId": schema, "idx": idx, "type": kind, "name": name, "offset": offset},
                )

    def add(self, table: str, **values: Any) -> None:
        self.rows[table].append(values)

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.add("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def kernel(self, name: str, start: int, end: int, pid: int, **values: Any) -> None:
        grid = {f"{what}{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
        own = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": MACHINE | pid << 24}
        names = {"demangledName": self.string(name), "shortName": self.string(name)}
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, **{**own, **grid, **names, **values})

    def call(self, name: str, start: int, end: int, pid: int, tid: int, correlation: int) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            **{"start": start, "end": end, "eventClass": 0, "globalTid": MACHINE | pid << 24 | tid},
            **{"correlationId": correlation, "nameId": self.string(name), "returnValue": 0},
        )

    def range(self, text: str, start: int, end: int | None, pid: int, tid: int, **values: Any) -> None:
        own = {"eventType": PUSH_POP, "globalTid": MACHINE | pid << 24 | tid, "domainId": 0}
        named = {"textId": self.string(text)} if text.startswith("nccl") and ":" not in text else {"text": text}
        self.add("NVTX_EVENTS", start=start, end=end, **{**own, **named, **values})

    def nccl(self, call: str, start: int, end: int, pid: int, tid: int, *numbers: int) -> None:
        """A call of NCCL with its payload: communicator and bytes, or communicator, ranks, rank and device."""
        layout, schema = ("<QQ", _MOVE) if len(numbers) == 2 else ("<Qiiixxxx", _INIT)
        payload = struct.pack(layout, *numbers) if numbers else b""
        head = struct.pack("<IIIIQQ", 1, 0, schema, 0, len(payload), 32 + len(payload))
        blob = {"binaryData": head + payload} if numbers else {}
        self.range(f"nccl{call}", start, end, pid, tid, domainId=1, **blob)

    def write(self, path: Path, without: Iterable[str] = ()) -> Path:
        """`without`: columns that older versions do not have."""
        left_out = set(without)
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as database:
            for table, rows in self.rows.items():
                columns = [one for one in TABLES[table].split(", ") if one.split()[0] not in left_out]
                if not rows:
                    continue
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                names = [one.split()[0] for one in columns]
                marks = ", ".join("?" * len(names))
                values = ([row.get(name) for name in names] for row in rows)
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        database.close()
        return path


def export_of(traces: Sequence[Path], *, sizes: bool = True) -> Export:
    """Returns what Nsight Systems would have recorded of these ranks of one node. `sizes`: whether NCCL's payloads are
    there."""
    documents = [_document(path) for path in traces]
    bases = [document.get("baseTimeNanoseconds", 0) for document in documents]
    epoch_ns = min(
        base + round(event["ts"] * 1000)
        for document, base in zip(documents, bases, strict=True)
        for event in document["traceEvents"]
        if event.get("ph") == "X"
    )
    export = Export(epoch_ns)
    for device in documents[0].get("deviceProperties", []):
        export.add("TARGET_INFO_GPU", id=device["id"], name=device["name"])
    for place, (document, base) in enumerate(zip(documents, bases, strict=True)):
        _Rank(export, document, pid=1000 + place, shift_ns=base - epoch_ns, sizes=sizes).add()
    return export


class _Rank:
    def __init__(self, export: Export, document: Row, *, pid: int, shift_ns: int, sizes: bool) -> None:
        self.export, self.pid, self.shift_ns, self.sizes = export, pid, shift_ns, sizes
        self.info = document.get("distributedInfo", {})
        self.events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
        self.device = next((event["args"]["device"] for event in self.events if event.get("cat") == "kernel"), 0)

    def add(self) -> None:
        for event in self.events:
            add = getattr(self, f"_{event.get('cat', '').lower()}", None)
            if add:
                add(event, event.get("args", {}))
        self._collectives()

    def _times(self, event: Row) -> Row:
        start = self.shift_ns + round(event["ts"] * 1000)
        return {"start": start, "end": start + round(event.get("dur", 0) * 1000)}

    def _thread(self, event: Row) -> Row:
        return {"pid": self.pid, "tid": int(event["tid"]) & 0xFFFFFF}

    def _on_device(self, event: Row, args: Row) -> Row:
        process = {"globalPid": MACHINE | self.pid << 24, "deviceId": self.device, "contextId": 1}
        return {**self._times(event), **process, "streamId": args["stream"], "correlationId": args.get("correlation")}

    def _kernel(self, event: Row, args: Row) -> None:
        grid = {f"{what}{axis}": args[what][i] for what in ("grid", "block") for i, axis in enumerate("XYZ")}
        name = event["name"].replace("(anonymous namespace)", "<unnamed>")
        self.export.kernel(name, pid=self.pid, **{**self._on_device(event, args), **grid})

    def _gpu_memcpy(self, event: Row, args: Row) -> None:
        _, kind, *memory = event["name"].replace("(", "").replace(")", "").split(" ")
        kinds = {"copyKind": _COPIES[kind], "srcKind": _MEMORY.index(memory[0]), "dstKind": _MEMORY.index(memory[-1])}
        self.export.add("CUPTI_ACTIVITY_KIND_MEMCPY", bytes=args["bytes"], **kinds, **self._on_device(event, args))

    def _gpu_memset(self, event: Row, args: Row) -> None:
        own = {"bytes": args["bytes"], "value": 0, "memKind": 2, **self._on_device(event, args)}
        self.export.add("CUPTI_ACTIVITY_KIND_MEMSET", **own)

    def _cuda_runtime(self, event: Row, args: Row) -> None:
        name = f"{event['name']}_v7000" if event["name"].startswith("cuda") else event["name"]
        times = self._times(event)
        self.export.call(name, **times, **self._thread(event), correlation=args.get("correlation", 0))

    _cuda_driver = _cuda_runtime

    def _cpu_op(self, event: Row, args: Row) -> None:
        seq = f", seq = {args['Sequence number']}" if "Sequence number" in args else ""
        op = f", op_id = {args.get('Ev Idx', 0) + 1}"
        self.export.range(f"{event['name']}{seq}{op}", **self._times(event), **self._thread(event))

    _user_annotation = _cpu_op

    def _collectives(self) -> None:
        groups = {group["pg_name"]: group for group in self.info.get("pg_config", [])}
        for group in groups.values():
            first = self._times(self.events[0])["start"]
            rank = group["ranks"].index(self.info["rank"]) if self.info["rank"] in group["ranks"] else 0
            self.export.nccl(
                "CommInitRankConfig", first, first, self.pid, 1, *(_hash(group), len(group["ranks"]), rank, 0)
            )
        said = {e["args"]["External id"]: e["args"] for e in self.events if "Collective name" in e.get("args", {})}
        launches = {
            event["args"]["correlation"]: event
            for event in self.events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "Launch" in event["name"]
        }
        for event in self.events:
            if event.get("cat") == "kernel" and "nccl" in event["name"]:
                args = event["args"]
                launch = launches.get(args["correlation"])
                args = args if "Collective name" in args else said.get(args.get("External id"), {})
                if launch and (args := args or self._said_before(launch)):
                    self._calls(args, groups, launch)

    def _said_before(self, launch: Row) -> Row:
        """What PyTorch said of the last message before a kernel that is launched for several together."""
        said = [
            event
            for event in self.events
            if event["name"] == "record_param_comms" and event["tid"] == launch["tid"] and event["ts"] < launch["ts"]
        ]
        return next((args for event in reversed(said) if (args := event["args"]).get("Collective name")), {})

    def _calls(self, args: Row, groups: dict[str, Row], launch: Row) -> None:
        times, thread = self._times(launch), self._thread(launch)
        comm = _hash(groups[args["Process Group Name"]])
        each = element_bytes(args["dtype"]) or 1
        sent, received = args["In msg nelems"] * each, args["Out msg nelems"] * each
        name = args["Collective name"]
        at, until = times["start"] - 200, times["end"]
        if call := _CALLS.get(name):
            size = received if call == "ReduceScatter" else sent
            self.export.nccl(call, at, until, *thread.values(), *((comm, size) if self.sizes else ()))
            return
        sends, receives = "send" in name or "all_to_all" in name, "recv" in name or "all_to_all" in name
        self.export.nccl("GroupStart", at, at + 10, *thread.values())
        for call, size, moves in (("Send", sent, sends), ("Recv", received, receives)):
            if moves:
                self.export.nccl(call, at + 20, at + 30, *thread.values(), *((comm, size) if self.sizes else ()))
        self.export.nccl("GroupEnd", at + 40, until, *thread.values())


def _hash(group: Row) -> int:
    return 0xC0FFEE0000000000 + sum(ord(letter) << i for i, letter in enumerate(group["pg_name"]))


def _document(path: Path) -> Row:
    text = path.read_bytes()
    found: Row = json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)
    return found
