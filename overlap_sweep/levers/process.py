"""Applies levers in a process of the user's training, and says of each whether it could be applied.

Constructors and functions are wrapped when the module that defines them has been imported, before the script can take
them from it. Calls are made at the end of the first step, when the model is there. What cannot be applied is left as
the script has it, with the reason.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

from overlap_sweep.errors import first_line
from overlap_sweep.levers import Constructor, Lever, Value, levers
from overlap_sweep.levers.status import APPLIED, SKIPPED, LeverStatus, add_status
from overlap_sweep.startup.sitecustomize import VARIABLE

T = TypeVar("T")
Function = Callable[..., Any]
Later = Iterator[bool]
"""The rest of a lever's call: it goes on at the end of each further step, and yields whether the lever is applied by
now. It may raise NotApplicable at any of them."""


class NotApplicable(Exception):
    """Why a lever cannot be applied to this training."""


class NotHere(Exception):
    """Why a lever is not for this call of a constructor; it may be for another one."""


def live(kind: type[T]) -> list[T]:
    """Returns all objects of a type, the oldest first."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        # What is frozen is not among the objects.
        gc.unfreeze()
    # Not isinstance, which asks objects that stand for others for their class.
    found = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    if is_frozen:
        gc.freeze()
    return found


class Levers:
    """The levers of this process."""

    def __init__(self, values: Mapping[str, Value], directory: str, *, override: bool) -> None:
        """`override`: change arguments that the script gives itself, too."""
        # In the order of the entries: a later one may need what an earlier one sets.
        self._values = {
            name: values[name] for name, lever in levers().items() if name in values and lever.is_in_process
        }
        self._directory, self._override = directory, override
        self._said: set[tuple[str, str]] = set()
        self._not_here: dict[str, str] = {}
        self._has_begun = False
        self._later: dict[str, Later] = {}
        self._undecided: set[str] = set()

    @property
    def is_undecided(self) -> bool:
        """Returns whether a lever will be applied, or not, at the end of a later step only."""
        return bool(self._undecided)

    def install(self) -> None:
        """Has constructors wrapped as soon as their modules are imported."""
        by_module: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        watched: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in self._values:
            if made := levers()[name].constructor:
                for target in made.of:
                    module, _, attribute = target.partition(":")
                    by_module[module][attribute].append(name)
            for target in levers()[name].unless:
                module, _, attribute = target.partition(":")
                watched[module][attribute].append(name)
        for module in {*by_module, *watched}:
            patch = functools.partial(self._patch, targets=by_module[module], watched=watched[module])
            if module in sys.modules:
                patch(sys.modules[module])
            else:
                sys.meta_path.insert(0, _AfterImport(module, patch))

    def _patch(self, module: ModuleType, targets: Mapping[str, list[str]], watched: Mapping[str, list[str]]) -> None:
        for attribute, names in targets.items():
            target = getattr(module, attribute, None)
            if target is None:
                for name in names:
                    self._say(name, SKIPPED, f"{module.__name__} has no {attribute}{_needs(name)}")
            elif inspect.isclass(target):
                setattr(target, "__init__", self._wrapped(target.__init__, attribute, names))  # noqa: B010, of mypy
            else:
                setattr(module, attribute, self._wrapped(target, attribute, names))
        for method, names in watched.items():
            owner, _, attribute = method.partition(".")
            found = getattr(module, owner, None)
            if hasattr(found, attribute):
                setattr(found, attribute, self._watched(getattr(found, attribute), attribute, names))

    def _watched(self, method: Function, called: str, names: Sequence[str]) -> Function:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Afterwards levers call it.
            for name in names if not self._has_begun else ():
                if levers()[name].way != "call":
                    self._say(name, SKIPPED, f"the script calls {called}")
                elif not self._override:
                    mend = "add job.levers_override=true to replace it"
                    self._say(name, SKIPPED, f"the script calls {called} itself; {mend}")
            return method(*args, **kwargs)

        return wrapped

    def _wrapped(self, function: Function, called: str, names: Sequence[str]) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                # The script's own mistake.
                return function(*args, **kwargs)
            for name, value in given.arguments.items():
                if name == "params" and isinstance(value, Iterator):
                    # Whoever is next would find it used up.
                    given.arguments[name] = list(value)
            args, kwargs = given.args, given.kwargs
            changed = self._changed(signature, given, called, names)
            if not changed:
                return function(*args, **kwargs)
            given.arguments |= dict(changed.values())
            try:
                made = function(*given.args, **given.kwargs)
            except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
                made = function(*args, **kwargs)
                for name in changed:
                    self._say(name, SKIPPED, f"{called} does not take it here ({first_line(error)})")
                return made
            for name in changed:
                self._say(name, APPLIED)
            return made

        return wrapped

    def _changed(
        self, signature: inspect.Signature, given: inspect.BoundArguments, called: str, names: Sequence[str]
    ) -> dict[str, tuple[str, Any]]:
        """Returns the arguments to change and their values, by lever; says why others are left."""
        changed: dict[str, tuple[str, Any]] = {}
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        for name in names:
            lever = levers()[name]
            assert lever.constructor
            argument = lever.constructor.argument
            if argument not in signature.parameters:
                self._say(name, SKIPPED, f"{called} has no argument {argument} in this version{_needs(name)}")
                continue
            default = defaults[argument]
            own = given.arguments.get(argument, default)
            try:
                value = self._value_of(
                    lever.constructor, self._values[name], defaults | given.arguments | dict(changed.values())
                )
            except NotHere as error:
                self._not_here[name] = str(error)
                continue
            except NotApplicable as error:
                self._say(name, SKIPPED, str(error))
                continue
            is_free = self._override or lever.overrides or lever.constructor.extends
            if own is not default and own != default and own != value and not is_free:
                self._say(
                    name,
                    SKIPPED,
                    f"the script gives {called} {argument}={own}; add job.levers_override=true to replace it",
                )
                continue
            changed[name] = argument, value
        return changed

    @staticmethod
    def _value_of(made: Constructor, value: Value, arguments: Mapping[str, Any]) -> Any:
        return _function(made.make)(value, arguments) if made.make else value

    def at_end_of_step(self) -> None:
        """Calls what levers call on the training at the end of its first step, and goes on with it at that of each."""
        if self._has_begun:
            for name, later in [*self._later.items()]:
                self._go_on(name, functools.partial(next, later))
            return
        self._has_begun = True
        for name, value in self._values.items():
            if levers()[name].call and (name, SKIPPED) not in self._said:
                self._go_on(name, functools.partial(self._begin, name, value))

    def _begin(self, name: str, value: Value) -> bool:
        later: Later | None = _function(levers()[name].call)(value)
        if later is None:
            return True
        self._later[name] = later
        return bool(next(later))

    def _go_on(self, name: str, call: Callable[[], bool]) -> None:
        self._undecided.add(name)
        try:
            is_applied = call()
        except NotApplicable as error:
            self._later.pop(name, None)
            self._say(name, SKIPPED, str(error))
        else:
            if not is_applied:
                return
            if levers()[name].way == "call":
                self._say(name, APPLIED)
        self._undecided.discard(name)

    def say_unmet(self) -> None:
        """Says of levers that nothing in this training has called for that they were not applied."""
        said = {name for name, _ in self._said}
        for name in self._values:
            if name not in said:
                reason = self._not_here.get(name, f"this training has made no {_made_by(levers()[name])}")
                self._say(name, SKIPPED, reason)

    def _say(self, name: str, status: str, reason: str = "") -> None:
        """Writes a status of a lever, but no second reason why it is skipped."""
        if (name, status) not in self._said:
            self._said.add((name, status))
            add_status(self._directory, LeverStatus(name, self._values[name], status, reason))


def _function(name: str) -> Function:
    module, _, function = name.partition(":")
    found: Function = getattr(import_module(module), function)
    return found


def _made_by(lever: Lever) -> str:
    assert lever.constructor
    return " or ".join(one.partition(":")[2] for one in lever.constructor.of)


def _needs(name: str) -> str:
    needs = levers()[name].needs
    return f"; it needs {needs}" if needs else ""


class _AfterImport:
    """Finds one module as Python does, and calls a function with it once it is imported."""

    def __init__(self, module: str, call: Callable[[ModuleType], None]) -> None:
        self._module, self._call = module, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(environment: Mapping[str, str] = os.environ) -> Levers | None:
    """Installs the levers that this process's environment asks for, once; None if there are none."""
    return _installed(environment.get(VARIABLE, ""))


@functools.cache
def _installed(wanted: str) -> Levers | None:
    asked = json.loads(wanted) if wanted else {}
    if not asked.get("levers"):
        return None
    found = Levers(asked["levers"], asked["directory"], override=asked.get("levers_override", False))
    found.install()
    return found
