"""Settings: the options that may differ between points that are compared, and what they are called."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from overlap_sweep.results.measured import Scalar

Options = dict[str, Scalar]
"""Values by dotted name; an option that is not set is missing or None."""

DEFAULTS = "defaults"
"""Name of the setting in which no option is changed."""


def value_in_words(value: Scalar) -> str:
    """Returns the value as it is typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)


def last_part(name: str) -> str:
    """Returns `bucket` of `job.values.bucket`."""
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class Naming:
    """How the options of a workload are named in tables and sentences, and what their defaults are."""

    brief: Callable[[str], str] = last_part
    """Returns an option's short name."""
    value: Callable[[Scalar], str] = value_in_words
    usual: Callable[[Options, str], Scalar] = lambda options, name: None
    """Returns the option's default beside these options."""
    ignored: Collection[str] = ()
    """Options that are never shown nor counted as changes."""

    def changed(self, options: Options) -> list[str]:
        """Returns the options that are not at their defaults."""
        return [
            name for name, value in options.items() if name not in self.ignored and value != self.usual(options, name)
        ]

    def in_words(self, options: Options, shown: Collection[str] | None = None) -> str:
        """Returns `bucket=25, compile=true`: the changed options, of those in `shown`; None: of all."""
        names = [name for name in self.changed(options) if shown is None or name in shown]
        return ", ".join(f"{self.brief(name)}={self.value(options[name])}" for name in names) or DEFAULTS

    def shared(self, settings: Sequence[Options]) -> str:
        """Returns the changed options that all settings have alike, in words; empty if there are none or only one
        setting."""
        names = differing(settings)
        alike = [name for name in self.changed(settings[0]) if name not in names]
        return self.in_words(settings[0], alike) if alike and len(settings) > 1 else ""

    def order(self, options: Options, name: str) -> tuple[bool, float, str]:
        """Returns a sort key for values of an option: the default first, then numbers ascending, then words."""
        value = options.get(name)
        number = float(value) if isinstance(value, int | float) else inf
        return value != self.usual(options, name), number, self.value(value)

    def simplicity(self, options: Options) -> tuple[int, list[tuple[bool, float, str]]]:
        """Returns a sort key that puts settings with fewer changed options first."""
        return len(self.changed(options)), [self.order(options, name) for name in sorted(options)]


def differing(settings: Iterable[Options]) -> list[str]:
    """Returns the options that differ between the settings."""
    known = list(settings)
    names = dict.fromkeys(name for options in known for name in options)
    # Text, in which true is not 1.
    return [name for name in names if len({repr(options.get(name)) for options in known}) > 1]


def key(options: Options) -> frozenset[tuple[str, str]]:
    """Returns what is equal for equal settings: unset options don't count, and true is not 1."""
    return frozenset((name, repr(value)) for name, value in options.items() if value is not None)


def numbered(names: Iterable[str]) -> list[str]:
    """Returns the names, of which equal ones get a number from the second on: `defaults #2`."""
    found: list[str] = []
    for name in names:
        alike, number = name, 1
        while alike in found:
            number += 1
            alike = f"{name} #{number}"
        found.append(alike)
    return found
