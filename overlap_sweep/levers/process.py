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
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from overlap_sweep.errors import first_line
from overlap_sweep.levers import Lever, Value, environment, levers
from overlap_sweep.levers.status import APPLIED, APPLIES, SKIPPED, THERE, USELESS, LeverStatus, add_status
from overlap_sweep.startup.sitecustomize import VARIABLE

T = TypeVar("T")
Function = Callable[..., Any]
Later = Iterator[bool]
"""The rest of a lever's call: it goes on at the end of each further step, and yields whether the lever is applied by
now. It may raise NotApplicable at any of them."""

_OVERRIDE = "add job.levers_override=true to replace it"


class NotApplicable(Exception):
    """Why a lever cannot be applied to this training."""


class NotHere(Exception):
    """Why a lever is not for this call of a constructor; it may be for another one."""


def live(kind: type[T]) -> list[T]:
    """Returns all objects of a type that are still in use."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        # What is frozen is not among the objects.
        gc.unfreeze()
    # A model that the script has dropped would be among them otherwise.
    gc.collect()
    # Not isinstance, which asks objects that stand for others for their class.
    found = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    if is_frozen:
        gc.freeze()
    return found


class Levers:
    """The levers of this process."""

    _refusals: type[Exception] = NotApplicable

    def __init__(self, values: Mapping[str, Value], directory: str, *, override: bool) -> None:
        """`override`: change arguments that the script gives itself, too."""
        # In the order of the entries: a later one may need what an earlier one sets.
        self._values = {
            name: values[name] for name, lever in levers().items() if name in values and lever.is_in_process
        }
        self._variables = {name: value for name, value in values.items() if levers()[name].environment}
        self._directory, self._override = directory, override
        self._said: dict[tuple[str, Value, str], LeverStatus] = {}
        self._process = os.getpid()
        self._not_here: dict[str, str] = {}
        self._step = 0
        self._later: dict[str, Later] = {}
        self._undecided: set[str] = set()

    @property
    def is_undecided(self) -> bool:
        """Returns whether a lever will be applied, or not, at the end of a later step only."""
        return bool(self._undecided)

    def install(self) -> None:
        """Has constructors wrapped as soon as their modules are imported, and methods by which scripts do the same, and
        sets variables again that the command may have changed on the way here."""
        self._set_variables()
        made, watched = defaultdict(list), defaultdict(list)
        # In their own order: what min_ctas sets besides must not come before max_ctas.
        for name, lever in ((one, lever) for one, lever in levers().items() if one in self._values):
            for target in lever.constructor.of if lever.constructor else []:
                made[target].append(name)
            for target in lever.unless:
                watched[target].append(name)
        for target, names in made.items():
            _when_imported(target, functools.partial(self._wrap, names))
        for target, names in watched.items():
            _when_imported(target, functools.partial(self._watch, names))

    def _set_variables(self) -> None:
        if self._override:
            os.environ.update(environment(self._variables))

    def _check_variables(self) -> None:
        """Says of variables that the training has other values of that they are not applied."""
        wanted = environment(self._variables)
        for name in self._variables:
            variable = levers()[name].environment
            now = os.environ.get(variable)
            if now != wanted[variable]:
                mend = "" if self._override else f"; {_OVERRIDE}"
                does = f"unsets {variable}" if now is None else f"sets {variable}={now}"
                self._say_of(name, self._variables[name], SKIPPED, f"the command {does} itself{mend}")

    def _wrap(self, names: Sequence[str], module: ModuleType, attribute: str) -> None:
        target = getattr(module, attribute, None)
        if target is None:
            for name in names:
                self._not_here[name] = f"{module.__name__} has no {attribute}{_needs(name)}"
        elif inspect.isclass(target):
            made = self._wrapped(target.__init__, attribute, names, is_class=True)
            setattr(target, "__init__", made)  # noqa: B010, of mypy
        else:
            setattr(module, attribute, self._wrapped(target, attribute, names, is_class=False))

    def _watch(self, names: Sequence[str], module: ModuleType, attribute: str) -> None:
        kind, _, called = attribute.partition(".")
        owner = getattr(module, kind, None)
        method = getattr(owner, called, None)
        if method is None:
            return

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Afterwards levers call it.
            for name in names if not self._step else ():
                if levers()[name].way != "call":
                    self._say(name, SKIPPED, f"the script calls {called}")
                elif not self._override:
                    self._say(name, SKIPPED, f"the script calls {called} itself; {_OVERRIDE}")
            return method(*args, **kwargs)

        setattr(owner, called, wrapped)

    def _wrapped(self, function: Function, called: str, names: Sequence[str], *, is_class: bool) -> Function:
        signature = inspect.signature(function)
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                # The script's own mistake.
                return function(*args, **kwargs)
            if isinstance(given.arguments.get("params"), Iterator):
                # Whoever is next would find it used up.
                given.arguments["params"] = list(given.arguments["params"])
            args, kwargs = given.args, given.kwargs
            changed = self._changes(names, called, defaults, given.arguments)
            if not changed:
                return function(*args, **kwargs)
            given.arguments |= dict(changed.values())
            try:
                made = function(*given.args, **given.kwargs)
            except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
                for name in changed:
                    self._say(name, SKIPPED, f"{called} does not take it here ({first_line(error)})")
                if not is_class:
                    # Nobody knows what it has done to its arguments before; an object is made anew.
                    raise
                return function(*args, **kwargs)
            for name in changed:
                self._say(name, APPLIED)
            return made

        return wrapped

    def _changes(
        self, names: Sequence[str], called: str, defaults: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, tuple[str, Any]]:
        """Returns which argument of a call each lever changes, and its value, and says of others why they do not."""
        changed: dict[str, tuple[str, Any]] = {}
        for name in names:
            try:
                changed[name] = self._changed(
                    name, self._values[name], called, defaults, {**given, **dict(changed.values())}
                )
            except NotHere as error:
                self._not_here[name] = str(error)
            except NotApplicable as error:
                self._say(name, SKIPPED, str(error))
        return changed

    def _changed(
        self, name: str, value: Value, called: str, defaults: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[str, Any]:
        """Returns which argument of a call a lever changes, and its value. NotHere or NotApplicable if it does not."""
        lever = levers()[name]
        assert lever.constructor
        argument = lever.constructor.argument
        if argument not in defaults:
            raise NotApplicable(f"{called} has no argument {argument} in this version{_needs(name)}")
        if lever.constructor.make:
            value = _function(lever.constructor.make)(value, {**defaults, **given})
        is_free = self._override or lever.overrides or lever.constructor.extends
        own = given.get(argument, defaults[argument])
        if own not in (defaults[argument], value) and not is_free:
            raise NotApplicable(f"the script gives {called} {argument}={own}; {_OVERRIDE}")
        return argument, value

    def at_end_of_step(self, step: int) -> None:
        """Calls what levers call on the training at the end of its first step, and goes on with it at that of each.

        `step`: its number. A step may end several times before its optimizers are known.
        """
        if self._process != os.getpid():
            # What was applied before this process was forked is so here.
            self._process = os.getpid()
            for status in self._said.values():
                add_status(self._directory, status)
        if step == self._step:
            return
        if not self._step:
            self._check_variables()
            skipped = {name for name, _, status in self._said if status in (SKIPPED, USELESS)}
            self._later = {
                name: _called(function, value)
                for name, value in self._values.items()
                if (function := self._at_end(levers()[name])) and name not in skipped
            }
        self._step = step
        for name, later in [*self._later.items()]:
            self._undecided.discard(name)
            try:
                if not next(later, True):
                    self._undecided.add(name)
                elif levers()[name].way == "call":
                    self._say(name, APPLIED)
            except self._refusals as error:
                del self._later[name]
                self._say(name, SKIPPED, first_line(error))

    def say_unmet(self) -> None:
        """Says of levers that nothing in this training has called for that they were not applied."""
        said = {name for name, _, _ in self._said}
        for name in self._values:
            if name not in said and (constructor := levers()[name].constructor):
                kinds = " or ".join(target.partition(":")[2] for target in constructor.of)
                self._say(name, SKIPPED, self._not_here.get(name, f"this training has made no {kinds}"))

    def _say(self, name: str, status: str, reason: str = "") -> None:
        """Writes a status of a lever, but no second reason why it is skipped."""
        self._say_of(name, self._values[name], status, reason)

    def _say_of(self, name: str, value: Value, status: str, reason: str = "") -> None:
        if (name, value, status) not in self._said:
            said = self._said[name, value, status] = LeverStatus(name, value, status, reason)
            add_status(self._directory, said)

    def _at_end(self, lever: Lever) -> str:
        """Returns the function that is called at the end of the first step; empty if there is none."""
        return lever.call


class Inspection(Levers):
    """Finds out which values of which levers this process would take, and has already, and changes nothing."""

    # Others' functions can raise anything, and those of levers ImportError with another PyTorch: the training goes on.
    _refusals = Exception

    def __init__(self, directory: str, *, override: bool) -> None:
        super().__init__({name: lever.values[0] for name, lever in levers().items()}, directory, override=override)

    @property
    def is_undecided(self) -> bool:
        """Returns that nothing is waited for."""
        return False

    def _set_variables(self) -> None:
        pass

    def _check_variables(self) -> None:
        """Says which values the variables have here, whoever has set them."""
        for name, lever in levers().items():
            now = os.environ.get(lever.environment) if lever.environment else None
            for value in lever.values if lever.environment else ():
                is_there = value == lever.default if now is None else lever.assigned(value) in now.split(",")
                said = "" if now is None else f"{lever.environment}={now}"
                self._say_of(name, value, THERE if is_there else APPLIES, said)

    def _changes(
        self, names: Sequence[str], called: str, defaults: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, tuple[str, Any]]:
        for name, value in ((lever, value) for lever in names for value in levers()[lever].values):
            try:
                argument, made = self._changed(name, value, called, defaults, given)
            except NotHere as error:
                self._not_here[name] = str(error)
            except self._refusals as error:
                self._say_of(name, value, USELESS, first_line(error))
            else:
                usual, own = defaults[argument], given.get(argument, defaults[argument])
                is_there = own == made or (own == usual and levers()[name].default in (value, made))
                self._say_of(name, value, THERE if is_there else APPLIES)
        return {}

    def _say(self, name: str, status: str, reason: str = "") -> None:
        for value in levers()[name].values:
            self._say_of(name, value, _INSPECTED[status], reason)

    def _at_end(self, lever: Lever) -> str:
        return lever.applies


_INSPECTED = {APPLIED: APPLIES, SKIPPED: USELESS}


def _function(name: str) -> Function:
    module, _, function = name.partition(":")
    found: Function = getattr(import_module(module), function)
    return found


def _called(function: str, value: Value) -> Later:
    """Calls a function of a lever, and yields whether the lever is applied, at once if the call was all."""
    made = _function(function)(value)
    yield from made if isinstance(made, Iterator) else (True,)


def _needs(name: str) -> str:
    needs = levers()[name].needs
    return f"; it needs {needs}" if needs else ""


def _when_imported(target: str, patch: Callable[[ModuleType, str], None]) -> None:
    """Calls `patch` with the module and the attribute of a target, `module:attribute`, once the module is imported."""
    module, _, attribute = target.partition(":")
    if module in sys.modules:
        patch(sys.modules[module], attribute)
    else:
        sys.meta_path.insert(0, _AfterImport(module, lambda imported: patch(imported, attribute)))


class _AfterImport:
    """Finds one module as Python would, and calls a function with it once it is imported."""

    def __init__(self, module: str, call: Callable[[ModuleType], None]) -> None:
        self._module, self._call = module, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        # Packages that are installed as editable have finders of their own.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (other.find_spec(name, path, target) for other in others)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(environment: Mapping[str, str] = os.environ) -> Levers | None:
    """Installs the levers that this process's environment asks for, or their inspection, once; None if there are
    none."""
    return _installed(environment.get(VARIABLE, ""))


@functools.cache
def _installed(wanted: str) -> Levers | None:
    asked = json.loads(wanted) if wanted else {}
    override = asked.get("levers_override", False)
    if asked.get("levers"):
        found = Levers(asked["levers"], asked["directory"], override=override)
    elif asked.get("inspect"):
        found = Inspection(asked["directory"], override=override)
    else:
        return None
    found.install()
    return found
