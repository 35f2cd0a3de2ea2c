"""Classifies events by name with the rules of kernel_classes.yaml."""

import re
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

import msgspec

Kind = Literal["gemm", "comm", "wait", "compute", "memory", "ignore"]
_LONGEST_NAME = 1 << 14
"""Longer names are cut: the time of some expressions grows with the square of the length."""

Category = Literal["kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation"]


class KernelClass(NamedTuple):
    kind: Kind
    library: str


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind = msgspec.field(name="class")
    library: str
    of: list[Category]
    function: str | list[str] = ""
    name: str | list[str] = ""


@cache
def classify(category: str, name: str) -> KernelClass:
    """Returns the class of an event of one of Kineto's device or host categories."""
    name = name[:_LONGEST_NAME]
    function = function_name(name) if category == "kernel" else name
    for kernel_class, name_pattern, function_pattern in _rules(category):
        if name_pattern.search(name) and function_pattern.search(function):
            return kernel_class
    raise ValueError(f"no rule for {category}")


def function_name(kernel: str) -> str:
    """Returns the qualified name of a kernel's function, from a demangled or Itanium-mangled name.

    `void cutlass::Kernel2<cutlass_80_tensorop_gemm>(Params)` is `cutlass::Kernel2`.
    """
    kernel = kernel[:_LONGEST_NAME]
    if kernel.startswith("_Z"):
        return _demangled_function(kernel)
    plain = kernel.replace("(anonymous namespace)", "anonymous")
    plain = _without_brackets(plain)
    # A truncated name has brackets that never close.
    plain = re.split(r"[<(\[{]", plain, maxsplit=1)[0]
    return plain.split()[-1] if plain.split() else ""


def _without_brackets(name: str) -> str:
    opened: list[int] = []
    parts: list[str] = []
    reach = 0
    for bracket in re.finditer("[<>]", name):
        parts.append(name[reach : bracket.start()])
        reach = bracket.end()
        if bracket[0] == "<":
            opened.append(len(parts))
            parts.append("<")
        elif opened:
            del parts[opened.pop() :]
        else:
            parts.append(">")
    return "".join(parts) + name[reach:]


def short_name(kernel: str) -> str:
    """Returns the function's name for a sentence."""
    return (function_name(kernel) or kernel)[:60]


def _demangled_function(mangled: str) -> str:
    rest = re.sub(r"^_Z(L|N[rVK]*)?", "", mangled)
    parts = []
    while length := re.match(r"L?(\d{1,9})", rest):
        end = length.end() + int(length[1])
        part, rest = rest[length.end() : end], rest[end:]
        parts.append("anonymous" if part.startswith("_GLOBAL__N") else part)
    return "::".join(parts)


@cache
def _rules(category: str) -> list[tuple[KernelClass, re.Pattern[str], re.Pattern[str]]]:
    text = resources.files(__package__).joinpath("kernel_classes.yaml").read_bytes()
    return [
        (KernelClass(rule.kind, rule.library), _compile(rule.name), _compile(rule.function))
        for rule in msgspec.yaml.decode(text, type=list[_Rule])
        if category in rule.of
    ]


def _compile(patterns: str | list[str]) -> re.Pattern[str]:
    alternatives = [patterns] if isinstance(patterns, str) else patterns
    return re.compile("|".join(f"(?:{pattern})" for pattern in alternatives), re.IGNORECASE)
