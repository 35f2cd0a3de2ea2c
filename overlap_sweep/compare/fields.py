"""What makes points of several datasets the same: which fields of their keys match, and which are what is compared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.measured import BASELINES, Key
from overlap_sweep.errors import UserError
from overlap_sweep.results.points import Case

COMPARED_FIRST = ("backend", "device")
COMPARED_IF_NOTHING_MATCHES = ("model", "tokens", "precision", "tp_size", "setting")

_IN_ERRORS = ("model", "tokens", "precision", "tp_size", "operator", "setting")
_MOST_IN_ERRORS = 3


def compared_fields(datasets: Sequence[Dataset]) -> list[str]:
    """The fields that are compared instead of matched. UserError where nothing matches however."""
    keys = _overlapped_keys(datasets)
    compared = [name for name in COMPARED_FIRST if _one_each(name, keys)]
    if _have_a_match(keys, compared):
        return compared
    more = [
        name
        for name in COMPARED_IF_NOTHING_MATCHES
        if _one_each(name, keys) and len({getattr(key, name) for of_dataset in keys for key in of_dataset}) > 1
    ]
    if more and _have_a_match(keys, [*compared, *more]):
        return [*compared, *more]
    raise UserError(_nothing_matches({dataset.label: of for dataset, of in zip(datasets, keys, strict=True)}))


def matchable(key: Key, compared: Collection[str]) -> Key:
    """Equal for what is to be matched. Baselines are matched by their names also where settings are compared."""
    kept = {"setting"} if key.setting in BASELINES else set()
    swept = key.swept if "setting" in compared else ""
    return Key(**(key._asdict() | {"swept": swept} | dict.fromkeys(set(compared) - kept)))


def differing_values(datasets: Sequence[Dataset], compared: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By field that is compared and by dataset its value, where they are not all the same."""
    labels = [dataset.label for dataset in datasets]
    differing = {}
    for name in compared:
        values = [list(dict.fromkeys(getattr(key, name) for key in of)) for of in _overlapped_keys(datasets)]
        # Of several passes each has a setting of its own.
        told = [" or ".join(of) if name == "setting" else of[0] for of in values]
        if len(set(told)) > 1:
            differing[name] = dict(zip(labels, told, strict=True))
    return differing


def telling_fields(datasets: Sequence[Dataset], compared: Collection[str]) -> list[str]:
    """The fields that tell cases apart, such as the model, where there are several of them."""
    keys = [measured.key for dataset in datasets for measured in dataset.measured]
    return [name for name in Case._fields if name not in compared and len({getattr(key, name) for key in keys}) > 1]


def _overlapped_keys(datasets: Sequence[Dataset]) -> list[list[Key]]:
    """Of each dataset what it overlapped; where some overlapped nothing, all that each has."""
    keys = [[measured.key for measured in dataset.measured] for dataset in datasets]
    overlapped = [[key for key in of_dataset if key.setting not in BASELINES] for of_dataset in keys]
    return overlapped if all(overlapped) else keys


def _one_each(name: str, keys: Iterable[Sequence[Key]]) -> bool:
    """Whether every dataset has a single value of it; of settings a single one for each pass and what was swept."""
    if name == "setting":
        return all(len({key._replace(setting="") for key in of_dataset}) == len(of_dataset) for of_dataset in keys)
    return all(len({getattr(key, name) for key in of_dataset}) == 1 for of_dataset in keys)


def _have_a_match(keys: Iterable[Sequence[Key]], compared: Collection[str]) -> bool:
    sets = [{matchable(key, compared) for key in of_dataset} for of_dataset in keys]
    return any(one & other for i, one in enumerate(sets) for other in sets[:i])


def _nothing_matches(keys: Mapping[str, Sequence[Key]]) -> str:
    values = {
        name: {label: sorted({str(getattr(key, name)) for key in of}) for label, of in keys.items()}
        for name in (*_IN_ERRORS, "backend")
    }
    differing = [name for name in _IN_ERRORS if not set.intersection(*map(set, values[name].values()))]
    told = "; ".join(
        f"{label} has " + ", ".join(f"{name} {_shortened(values[name][label])}" for name in differing or values)
        for label in keys
    )
    return f"No point of one is also in another: {told}. Give sweeps that have points in common."


def _shortened(names: Sequence[str]) -> str:
    return "/".join([*names[:_MOST_IN_ERRORS], *(["..."] if len(names) > _MOST_IN_ERRORS else [])])
