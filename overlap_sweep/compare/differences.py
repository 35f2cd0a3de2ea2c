"""What else changed: the environment and the configuration of the points, without what matching tells already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.overlap import space

_MATCHED = {
    *("tp_size", "operator", "phase", "phases", "method", "repetition", "precision", "backend"),
    *("model.name", "workload.name", "workload.tokens", "layer.kind", "layer.num_replicas", "layer.training"),
    *("kernel", "m", "n", "k", "impl", "dp_size"),
    *space.KNOBS,
}
"""With what is never the same."""

_MATCHED_BY_NAME = ("phases.", "layer.configurations.", "layer.variants", "implementations.", "copy_engine.")
"""What begins so: settings, the files of variants, and sizes of copies."""


@dataclass(frozen=True)
class Difference:
    """Something about the environment or the configuration that is not the same everywhere."""

    name: str
    values: dict[str, list[Any]]
    """By dataset: one, or all that its points have; empty where it is not recorded."""


def environment_differences(datasets: Sequence[Dataset]) -> list[Difference]:
    return _differences(
        {
            dataset.label: [_flat(point.result.environment) for point in dataset.points if point.result]
            for dataset in datasets
        }
    )


def configuration_differences(datasets: Sequence[Dataset]) -> list[Difference]:
    return _differences(
        {
            dataset.label: [_own_configuration(point.config) for point in dataset.points if point.status == "ok"]
            for dataset in datasets
        }
    )


def _own_configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in _flat(config).items()
        if name not in _MATCHED and not name.startswith(_MATCHED_BY_NAME)
    }


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`packages.torch` of {"packages": {"torch": ...}}."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _differences(of_datasets: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Difference]:
    """By name, whatever some dataset has another set of values of."""
    names = dict.fromkeys(name for of_dataset in of_datasets.values() for flat in of_dataset for name in flat)
    found = []
    for name in names:
        values = {label: _values(name, of_dataset) for label, of_dataset in of_datasets.items()}
        if any(of_dataset != next(iter(values.values())) for of_dataset in values.values()):
            found.append(Difference(name, values))
    return found


def _values(name: str, of_dataset: Iterable[Mapping[str, Any]]) -> list[Any]:
    known = {repr(flat[name]): flat[name] for flat in of_dataset if flat.get(name) is not None}
    return [known[text] for text in sorted(known)]
