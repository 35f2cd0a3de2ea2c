"""Rows, read by NCCL's example tuner plugin itself.

NCCL_EXAMPLE_TUNER names the built plugin (plugins/tuner/example of NCCL's repository) of one or more versions from 2.30
on, separated by colons; it needs no GPU. That of 2.27.5 to 2.29.7 ends the process at the first row that matches: it
reads NCCL's table of costs as pointers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from overlap_sweep.nccl.settings import ALGORITHMS, Algorithm, Collective, GroupSetting, Protocol
from tests.nccl.settings import LARGE, one

PLUGINS = [*filter(None, os.environ.get("NCCL_EXAMPLE_TUNER", "").split(":"))]
COLLECTIVES = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
NUMBERED: tuple[Algorithm, ...] = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
"""In the order of NCCL's numbers, as are the protocols in `Protocol`."""
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
IGNORED, COST = -1.0, 5.0
Table = (ctypes.c_float * len(PROTOCOLS)) * len(NUMBERED)

pytestmark = [
    pytest.mark.skipif(not PLUGINS, reason="needs NCCL_EXAMPLE_TUNER, the path of libnccl-tuner-example.so"),
    pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: Path(path).parent.name),
]

ASK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
)
START = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class Answer(NamedTuple):
    channels: int
    """0 is NCCL's own number."""
    preferred: tuple[str, str] | None
    """Algorithm and protocol; None leaves the choice to NCCL."""


class Tuner:
    """A communicator's tuner, as NCCL asks it."""

    def __init__(self, plugin: str, ranks: int, nodes: int = 1) -> None:
        library = ctypes.CDLL(plugin)
        members = (ctypes.c_void_p * 3).in_dll(library, "ncclTunerPlugin_v5")
        self.context = ctypes.c_void_p()
        start, self.ask = START(members[1] or 0), ASK(members[2] or 0)
        assert start(ctypes.byref(self.context), 0, ranks, nodes, None, None, None) == 0

    def answer(self, collective: Collective, size: int = 1 << 20, ignored: Iterable[Algorithm] = ()) -> Answer:
        table, channels = Table(), ctypes.c_int(0)
        for algorithm, row in zip(NUMBERED, table, strict=True):
            row[:] = [IGNORED if algorithm in ignored else COST] * len(PROTOCOLS)
        status = self.ask(
            self.context,
            COLLECTIVES.index(collective),
            size,
            1,
            ctypes.addressof(table),
            len(NUMBERED),
            len(PROTOCOLS),
            0,
            ctypes.byref(channels),
        )
        assert status == 0
        chosen = [
            (a, p)
            for a, row in zip(NUMBERED, table, strict=True)
            for p, cost in zip(PROTOCOLS, row, strict=True)
            if not cost
        ]
        return Answer(channels.value, chosen[0] if chosen else None)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", str(tmp_path / "tuner.csv"))
    return tmp_path / "tuner.csv"


def test_rows_are_what_the_settings_say(plugin: str, file: Path) -> None:
    small = GroupSetting(description="tp", size=2, nodes=1, max_bytes=65536, algorithm="ring", protocol="ll")
    file.write_text(one("tuner", LARGE, small).text)
    dp, tp = Tuner(plugin, 4), Tuner(plugin, 2)

    assert dp.answer("reduce_scatter", 1 << 20) == (4, ("ring", "ll128"))
    assert dp.answer("reduce_scatter", 1 << 40) == (4, ("ring", "ll128"))
    assert [tp.answer(name, 65536) for name in COLLECTIVES] == [(0, ("ring", "ll"))] * 5
    assert Tuner(plugin, 2, nodes=2).answer("all_gather", 65536).preferred is None


def test_what_matches_no_row_gets_one_channel(plugin: str, file: Path) -> None:
    found = one("tuner", LARGE)
    file.write_text(found.text)
    assert "answers 1 channel" in found.warnings[0]
    dp = Tuner(plugin, 4)
    assert dp.answer("reduce_scatter", (1 << 20) - 1) == (1, None)
    assert dp.answer("all_reduce") == (1, None)
    assert Tuner(plugin, 8).answer("reduce_scatter") == (1, None)


def test_minus_one_channels_are_one_and_zero_are_those_of_nccl(plugin: str, file: Path) -> None:
    row = "allreduce,0,100,ring,ll,{},-1,-1\n"
    file.write_text(row.format(-1))
    assert Tuner(plugin, 4).answer("all_reduce", 100).channels == 1
    file.write_text(row.format(0))
    assert Tuner(plugin, 4).answer("all_reduce", 100).channels == 0


def test_rows_cannot_tell_groups_of_one_size_apart(plugin: str, file: Path) -> None:
    file.write_text(one("tuner", LARGE).text)
    assert (
        Tuner(plugin, 4).answer("reduce_scatter") == Tuner(plugin, 4).answer("reduce_scatter") == (4, ("ring", "ll128"))
    )


def test_what_is_for_fewer_wins(plugin: str, file: Path) -> None:
    every = GroupSetting(algorithm="ring", protocol="simple", max_ctas=16)
    file.write_text(one("tuner", every, LARGE).text)
    assert Tuner(plugin, 4).answer("reduce_scatter").channels == 4
    assert Tuner(plugin, 8, nodes=2).answer("reduce_scatter") == (16, ("ring", "simple"))


def test_every_algorithm_and_protocol_has_the_name_of_the_plugin(plugin: str, file: Path) -> None:
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            for protocol in PROTOCOLS:
                setting = GroupSetting(collective=collective, algorithm=algorithm, protocol=protocol, max_ctas=3)
                file.write_text(one("tuner", setting, multicast=True).text)
                assert Tuner(plugin, 4).answer(collective) == (3, (algorithm, protocol))


def test_what_nccl_cannot_do_is_passed_over(plugin: str, file: Path) -> None:
    file.write_text("allreduce,0,99999999,tree,ll,8,-1,-1\nallreduce,0,99999999,ring,ll,4,-1,-1\n")
    assert Tuner(plugin, 4).answer("all_reduce", ignored=["tree"]) == (4, ("ring", "ll"))
    assert Tuner(plugin, 4).answer("all_reduce", ignored=["tree", "ring"]) == (1, None)


def test_a_group_of_many_ranks_makes_no_row_of_its_comment(plugin: str, file: Path) -> None:
    many = GroupSetting(ranks=tuple(range(512)), algorithm="ring", protocol="simple", max_ctas=8)
    file.write_text(one("tuner", many).text)
    assert Tuner(plugin, 512).answer("all_reduce") == (8, ("ring", "simple"))
    assert Tuner(plugin, 511).answer("all_reduce") == (1, None)


def test_the_plugin_reads_rows_as_the_page_says(plugin: str, file: Path) -> None:
    def matched(row: str, size: int = 50) -> Answer:
        file.write_text(f"{row}\n")
        return Tuner(plugin, 4).answer("all_reduce", size)

    taken, not_taken = Answer(8, ("ring", "simple")), Answer(1, None)
    assert matched("allreduce,0,100,ring,simple,8,-1,-1") == taken
    assert matched("allreduce,0,100,ring,simple,8,-1,-1,-1,-1") == taken
    assert matched("allreduce,0,100,ring,simple,8,-1,-1,-1,1") == not_taken
    assert matched("allreduce,0,100,ring,simple,8,-1,-1,2,-1") == not_taken
    assert matched("allreduce,-1,100,ring,simple,8,-1,-1") == not_taken
    assert matched("allreduce,0,-1,ring,simple,8,-1,-1") == taken
    assert matched("all-reduce,0,100,rings,simpel,8,-1,-1") == taken
    assert matched("# allreduce,0,100,ring,simple,8,-1,-1") == not_taken
    assert matched("collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks", size=0) == not_taken
    assert matched(f"#{' ' * 254}allreduce,0,100,ring,simple,8,-1,-1") == taken
