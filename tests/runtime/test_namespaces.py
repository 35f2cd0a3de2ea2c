"""Two nodes with a slow link between them: what is fastest there is not what is fastest within a node."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlap_sweep.results.records import read_records
from tests.by_hand import FSDP, ByHand
from tests.sweeps import Launch

MBIT_S = 50
SMALL = (
    *("model.hidden_size=128", "model.ffn_hidden_size=256", "ranking.vocab_size=50", "ranking.num_sparse_features=2"),
    *("training.max_steps=2", "training.batch_size=16", "ranking.sequence_length=32", "workload.warmup=0"),
    *("workload.repeats=5", "workload.steps=1", "profile=none"),
)
"""A step takes 0.4 s over the link, far more than what other processes on this machine change."""
SEARCH = (*FSDP, *SMALL, "hydra/sweeper=knobs", "fsdp.replicas=1,nodes", "runtime.nodes=1,2")

ADDRESSES = ("10.213.7.1", "10.213.7.2")
_HOSTS = Path("/etc/netns")
"""Folder of the files that `ip netns exec` mounts over those of /etc."""


@contextmanager
def two_namespaces(mbit_s: int) -> Iterator[list[list[str]]]:
    """Returns for each node the words before a command that run it there. OSError or CalledProcessError if this machine
    has no namespaces for us."""
    names = [f"overlap_{os.getpid()}_{node}" for node in range(2)]
    try:
        for node, name in enumerate(names):
            _run("ip", "netns", "add", name)
            (_HOSTS / name).mkdir(parents=True)
            (_HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{node}\n")
        link = f"ip link add wire type veth peer name wire netns {names[1]}"
        _run(*_within(names[0]), *link.split())
        for name, address in zip(names, ADDRESSES, strict=True):
            _run(*_within(name), *f"ip address add {address}/24 dev wire".split())
            for interface in ("lo", "wire"):
                _run(*_within(name), *f"ip link set {interface} up".split())
            limit = f"tc qdisc add dev wire root tbf rate {mbit_s}mbit burst 64kb latency 400ms"
            _run(*_within(name), *limit.split())
        hostname = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh"]
        yield [[*_within(name), *hostname, f"node{node}"] for node, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(_HOSTS / name, ignore_errors=True)


def why_not() -> str | None:
    """Returns why there can be no namespaces here; None if there can."""
    try:
        with two_namespaces(1000) as nodes:
            for node in nodes:
                _run(*node, "true")
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {error.stderr.strip()}"
    except OSError as error:
        return str(error)
    return None


def _within(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.mark.end_to_end
@pytest.mark.quiet
def test_over_a_slow_link_the_search_shards_within_nodes(tmp_path: Path) -> None:
    """No variable names the interface, though the nodes' own names are of loopback."""
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with two_namespaces(MBIT_S) as within:
        one = ByHand(Launch(tmp_path / "sweep"), SEARCH, within=within, address=ADDRESSES[0])
        try:
            (printed, error), _ = one.end(240)
        finally:
            one.kill()
    assert [process.returncode for process in one.nodes] == [0, 0], printed + error
    assert not one.launch.processes()
    # Within a node both values are the same setting: there is nothing to choose.
    (record,) = read_records(tmp_path / "sweep").knobs.values()
    (found,) = record.searches
    assert "runtime.nodes=2" in found.overrides
    assert found.best == {"fsdp.replicas": "nodes"}
    assert found.proven
    assert found.gain
    assert found.gain.share > found.gain.noise
    results = one.launch.results().values()
    assert {result.recorded["fsdp"]["replicas"] for result in results} == {1, 2}
    assert all(result.environment["hosts"] == ["node0", "node1"] for result in results)
