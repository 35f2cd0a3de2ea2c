"""Two nodes with a slow link between them: what is fastest there is not what is fastest within a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.results.records import read_records
from tests.by_hand import FSDP, ByHand
from tests.namespaces import ADDRESSES, two_namespaces, why_not
from tests.sweeps import Launch

MBIT_S = 50
SMALL = (
    *("model.hidden_size=128", "model.ffn_hidden_size=256", "ranking.vocab_size=50", "ranking.num_sparse_features=2"),
    *("training.max_steps=2", "training.batch_size=16", "ranking.sequence_length=32", "workload.warmup=0"),
    *("workload.repeats=5", "workload.steps=1", "profile=none"),
)
"""A step takes 0.4 s over the link, far more than what other processes on this machine change."""
SEARCH = (*FSDP, *SMALL, "hydra/sweeper=knobs", "fsdp.replicas=1,nodes", "runtime.nodes=1,2")


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
