"""Names, groups and sizes of collectives, from what NCCL's kernels and annotations, c10d's operators and gloo's spans
record."""

import ast
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

import msgspec

from overlap_sweep.trace import MOST_RANKS
from overlap_sweep.trace.columns import MOST_ELEMENTS, Detail, ProcessGroup
from overlap_sweep.trace.nvtx import BYTES

_C10D, _NCCL = "c10d::", "nccl:"

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")

_TYPES = {
    **{"half": "float16", "float": "float32", "double": "float64", "byte": "uint8", "char": "int8"},
    **{"short": "int16", "int": "int32", "long": "int64", "long long": "int64"},
    **{"complexhalf": "complex32", "complexfloat": "complex64", "complexdouble": "complex128"},
}
"""Types as collectives on GPUs record them, and C++ spells them, without `signed` and `unsigned`."""

_BITS = re.compile(r"(?:bfloat|float|u?int|complex)(\d+)")

_MESSAGES = ("send", "recv")
_KINDS = (
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    # The last two are kernels of vLLM and aiter.
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce|quickreduce", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all|a2a", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("send_recv", re.compile(r"send_?recv", re.IGNORECASE)),
    ("send", re.compile(r"(^|\W|_)send", re.IGNORECASE)),
    ("recv", re.compile(r"(^|\W|_)recv|receive", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
    ("gather", re.compile(r"gather", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
)


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    about: str
    """What the program calls it; empty if it does not say."""
    ranks: tuple[int, ...]
    """Empty if unknown."""
    size: int | None

    @property
    def title(self) -> str:
        """Returns the name for people."""
        return f"{self.name} ({self.about})" if self.about else self.name

    @property
    def described(self) -> str:
        """Returns the description that the program made it with; PyTorch's of the first group."""
        return self.about or ("default_pg" if self.name == "0" else "")


def collective_of(detail: Detail, name: str, library: str) -> str:
    """Returns the collective's common name, such as all_gather, from what the trace says about it (`detail`), or from
    the name of the kernel, operator or span; the library of a kernel that is no collective."""
    return _kind_in(detail.collective or "") or (_kind_in(name) if library != "peer_copy" else "") or library


@lru_cache(1 << 12)
def _kind_in(said: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(said)), "")


def group_of(name: str, detail: Detail | None, configured: ProcessGroup | None) -> Group:
    """Returns a process group from the trace's list of groups and from a collective's own fields."""
    about = (configured.about if configured else None) or (detail.group_about if detail else None) or ""
    ranks = (tuple(configured.ranks) if configured else ()) or _ranks(detail.group_ranks if detail else None)
    size = (configured.size if configured else None) or (detail.group_size if detail else None)
    return Group(
        name=name,
        about="" if about in ("undefined", "default_pg") else about,
        ranks=ranks,
        size=len(ranks) or size,
    )


def _ranks(written: str | None) -> tuple[int, ...]:
    """Returns the ranks of `[0, 1]`; none if the list is cut, `[0, 1, ..., 63]`, as in large groups."""
    try:
        ranks = msgspec.json.decode(written or "[]", type=tuple[int, ...])
    except msgspec.MsgspecError:
        return ()
    return ranks if all(0 <= rank < MOST_RANKS for rank in ranks) else ()


@lru_cache(1 << 12)
def type_of(written: str | None) -> str:
    """Returns the type as PyTorch calls it, such as bfloat16; as it is written if it is unknown."""
    name = re.sub(r"c10::|[<>]", "", (written or "").lower())
    words = [word for word in name.split() if word not in ("signed", "unsigned")]
    # Such as `long unsigned int`.
    known = _TYPES.get(" ".join(words[:-1] if len(words) > 1 and words[-1] == "int" else words))
    return f"{'u' if 'unsigned' in name else ''}{known}" if known else name


def element_bytes(written: str | None) -> int | None:
    """Returns the bytes of one element of a type; None if it is unknown."""
    name = type_of(written)
    bits = _BITS.match(name)
    return max(int(bits[1]) // 8, 1) if bits else 1 if name in ("bool", BYTES) else None


_Argument = tuple[int, str | None]
"""Elements and type of tensors that an operator was given."""


def sizes_of_host(name: str, detail: Detail, span: Detail | None = None) -> Detail:
    """Returns what the dimensions of an operator's arguments, in traces with shapes, say about a collective on the CPU.
    `name`, `detail`: of the operator, `c10d::_allgather_base_`, or of gloo's own span; `span`: of the span, if it is
    not the same. c10d's operators are given what they write, then what they read, unless they work in place."""
    given = _arguments(detail.shape)
    dtypes = [one[1] for one in (*given, *_arguments(span.shape if span else None)) if one and one[1]]
    sent, received = _sent_and_received(name, [one and one[0] for one in given])
    return detail._replace(
        # gloo reduces and scatters by an all-reduce: the operator knows better than the span.
        collective=name if "c10d" in name else None,
        sent=sent,
        received=received,
        dtype=dtypes[0] if dtypes else None,
    )


@lru_cache(1 << 12)
def detail_around(described: tuple[tuple[str, Detail], ...]) -> Detail | None:
    """Returns what the operators and annotations around the launch of a kernel, from the innermost outwards, say about
    its collective; None if none of them names one. The outermost one is what the program called: a barrier all-reduces,
    and NCCL runs all-to-alls, gathers and scatters by kernels of other names."""
    if said := next((detail for _, detail in described if detail.collective), None):
        return said
    kinds = [collective_of(Detail(), name, "") for name, _ in described]
    called = next(filter(None, reversed(kinds)), None)
    if called is None:
        return None
    outwards = zip(described, kinds, strict=True)
    found = [sizes_of_host(name, detail) for (name, detail), kind in outwards if kind == called][::-1]
    return Detail(
        collective=called,
        sent=next((one.sent for one in found if one.sent is not None), None),
        received=next((one.received for one in found if one.received is not None), None),
        dtype=next((one.dtype for one in found if one.dtype), None),
    )


def batched(described: Iterable[tuple[str, Detail]]) -> Detail | None:
    """Returns what is known of sends and receives that one kernel does together; None if nothing is. `described`: name
    and detail of the operators before its launch, the last first, which begin with those of the batch."""
    found = [
        detail
        for name, detail in takewhile(lambda one: collective_of(one[1], one[0], "") in _MESSAGES, described)
        if detail.collective
    ]
    if len({(one.group, one.dtype) for one in found}) != 1:
        return None
    if len(found) == 1:
        return found[0]
    kinds = [collective_of(one, "", "") for one in found]
    sent, received = (
        sum(one.sent or 0 for one, kind in zip(found, kinds, strict=True) if kind == wanted) for wanted in _MESSAGES
    )
    kind = kinds[0] if len(set(kinds)) == 1 else "send_recv"
    return found[0]._replace(collective=kind, sent=sent or None, received=received or None, peer=None)


def _sent_and_received(name: str, elements: list[int | None]) -> tuple[int | None, int | None]:
    first, second = (*elements, None, None)[:2]
    kind = collective_of(Detail(), name, "")
    if name.startswith(_NCCL):
        # Annotations record each tensor that is read; of a scatter those that are written.
        first = None if None in elements or not elements else sum(one or 0 for one in elements)
        if kind == "scatter":
            return None, first
    if kind in ("all_reduce", "broadcast", "reduce"):
        return first, first
    if kind == "send":
        return first, None
    if kind == "recv":
        return None, first
    # gloo's spans record what is read, too.
    return (second, first) if name.startswith(_C10D) else (first, None)


def _arguments(shape: str | None) -> list[_Argument | None]:
    """Returns the tensors in a detail's shape, `[[4], [[2, 3], [5]], []] ['float', 'TensorList', '']`, by argument."""
    dims, separator, types = (shape or "").partition("] ['")
    if not separator:
        return []
    try:
        listed = zip(ast.literal_eval(f"{dims}]"), ast.literal_eval(f"['{types}"), strict=True)
        return [_argument(dims if dtype == "TensorList" else [dims], dtype) for dims, dtype in listed]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # The last two: not dimensions, but something nested deeply.
        return []


def _argument(tensors: list[list[int]], dtype: str) -> _Argument | None:
    """Returns what is known of the argument with these dimensions, none of which versions before 2.0 record of a list;
    None of what is no tensor."""
    if not tensors or dtype in ("", "Scalar", "ScalarList"):
        return None
    elements = sum(map(math.prod, tensors))
    if not 0 <= elements < MOST_ELEMENTS:
        return None
    return elements, None if dtype == "TensorList" else dtype
