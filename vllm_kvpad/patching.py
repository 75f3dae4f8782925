"""Named, checked, reversible changes to a package that is already imported.

A :class:`Patch` is data: what it replaces, the parameters the target must have, and
how the replacement is made from the original. A :class:`PatchSet` is applied whole
or not at all: every target is looked up and its signature compared before the first
one is replaced, so a host that changed in one place is left exactly as it was.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

ANY = "*"
"""Stands for a parameter of any name in :attr:`PatchPoint.parameters`."""


class PatchError(RuntimeError):
    """A patch point is missing, has another signature, or cannot be restored."""


@dataclass(frozen=True)
class PatchPoint:
    """A function, method, class or property of another package, and its shape.

    Attributes:
        target: ``"package.module:Qualified.name"``.
        parameters: Names of its parameters in order, ``self`` included; :data:`ANY`
            for one whose name does not matter. For a property, those of its getter;
            for a class, those of the call that makes an instance.
        and_more: Whether further parameters are fine, as long as a call can do
            without them.
        mentions: Names that its code has to contain: parameters, attributes that it
            sets or reads, functions and keyword arguments that it uses. For a class,
            the code of its ``__init__``.
    """

    target: str
    parameters: tuple[str, ...]
    and_more: bool = False
    mentions: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """The shape, for people."""
        using = f" using {', '.join(self.mentions)}" if self.mentions else ""
        return self._signature + using

    @property
    def _signature(self) -> str:
        more = ["..."] if self.and_more else []
        return f"({', '.join([*self.parameters, *more])})"

    def find(self) -> tuple[Any, str, Any]:
        """Return the owner, the attribute's name and its current value, whatever it is.

        The value is the attribute as it stands in the owner's own namespace, so a
        property is returned as the property object.

        Raises:
            PatchError: The module cannot be imported or the name is missing; the
                message names the target.
        """
        module_name, _, qualified_name = self.target.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise PatchError(f"{self.target}: {error}") from error
        *path, name = qualified_name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        value = None if owner is None else inspect.getattr_static(owner, name, None)
        if value is None:
            raise PatchError(f"{self.target}: not found")
        return owner, name, value

    def resolve(self) -> tuple[Any, str, Any]:
        """Return what :meth:`find` returns, if it has the expected shape.

        Raises:
            PatchError: As :meth:`find`, or the parameters differ, or the code lacks a
                name, or what is there is another package's and not a wrapper of the
                target's own (``functools.wraps``); the message names the target and
                what was found.
        """
        owner, name, value = self.find()
        module = _module_of(value)
        package = self.target.partition(":")[0].partition(".")[0]
        is_foreign = module.partition(".")[0] != package
        found = _parameters(value)
        if found is None or not self._takes(found):
            names = [f"<{type(value).__name__}>"] if found is None else found
            raise PatchError(
                f"{self.target}: takes ({', '.join(names)}), expected {self._signature}"
                + (f"; it was replaced by {module}" if is_foreign else "")
            )
        if is_foreign:
            raise PatchError(
                f"{self.target}: replaced by {module}, by something that does not "
                "wrap the original (functools.wraps)"
            )
        if missing := sorted(set(self.mentions) - _names_in_code(value)):
            raise PatchError(
                f"{self.target}: its code does not use {', '.join(missing)}"
            )
        return owner, name, value

    def _takes(self, found: dict[str, inspect.Parameter]) -> bool:
        count = len(self.parameters)
        further = list(found.values())[count:]
        return (
            len(found) >= count
            and all(
                expected in (ANY, name)
                for expected, name in zip(self.parameters, found, strict=False)
            )
            and (self.and_more or not further)
            and all(_is_optional(parameter) for parameter in further)
        )


def _is_optional(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is not parameter.empty or parameter.kind in variadic


def _parameters(value: Any) -> dict[str, inspect.Parameter] | None:
    """Parameters by name, in order; None for what cannot be called."""
    function = _function_of(value)
    if not callable(function):
        return None
    return dict(inspect.signature(function).parameters)


def _names_in_code(value: Any) -> set[str]:
    """Every name and string in a function's code, parameters and nested ones too."""
    value = _function_of(value)
    if isinstance(value, type):
        value = inspect.getattr_static(value, "__init__")
    code = getattr(inspect.unwrap(value), "__code__", None)
    return set() if code is None else set(_strings_of(code))


def _strings_of(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames)
    pending: list[Any] = list(code.co_consts)
    while pending:
        constant = pending.pop()
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings_of(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            pending += constant


def _function_of(value: Any) -> Any:
    return value.fget if isinstance(value, property) else value


def _module_of(value: Any, *, unwrapped: bool = True) -> str:
    """The module whose code ``value`` is; by default beneath all wrappers.

    Not by ``__module__``, which a wrapper takes over from what it wraps; a class can
    only be asked for that.
    """
    function = _function_of(value)
    if isinstance(function, type):
        return function.__module__
    if unwrapped and callable(function):
        function = inspect.unwrap(function)
    namespace = getattr(function, "__globals__", None) or {}
    return str(namespace.get("__name__", type(function).__module__))


@dataclass(frozen=True)
class Patch:
    """One replacement: ``make(original)`` returns what takes the original's place.

    Attributes:
        point: What is replaced.
        make: Makes the replacement.
        everywhere: Also replace it in every module of its package that has imported
            it by name. Modules that are imported later find the replacement where
            they import it from. Reverting goes over all modules again.
    """

    point: PatchPoint
    make: Callable[[Any], Any]
    everywhere: bool = False


@dataclass(frozen=True)
class _Applied:
    owner: Any
    name: str
    original: Any
    replacement: Any
    everywhere: bool

    def replace(self) -> None:
        setattr(self.owner, self.name, self.replacement)
        if self.everywhere:
            _replace_imported(self.owner, self.original, self.replacement)

    def restore(self) -> None:
        setattr(self.owner, self.name, self.original)
        if self.everywhere:
            _replace_imported(self.owner, self.replacement, self.original)

    @property
    def current(self) -> Any:
        return inspect.getattr_static(self.owner, self.name, None)

    @property
    def is_in_force(self) -> bool:
        """Whether calls still get to the replacement, through wrappers or at once."""
        function, replacement = map(_function_of, (self.current, self.replacement))
        while function is not None and function is not replacement:
            function = getattr(function, "__wrapped__", None)
        return function is not None

    def __str__(self) -> str:
        module = _module_of(self.current, unwrapped=False)
        return f"{self.owner.__name__}.{self.name} (by {module})"


def _replace_imported(home: ModuleType, old: Any, new: Any) -> None:
    """Rebind each global of ``home``'s package that is ``old`` to ``new``."""
    package = home.__name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] != package:
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)


class PatchSet:
    """Patches that are applied together or not at all.

    Args:
        patches: What is replaced.
        required: Points that the replacements call and that must look as expected,
            but that are left alone.
    """

    def __init__(
        self, patches: Sequence[Patch], required: Iterable[PatchPoint] = ()
    ) -> None:
        self._patches = tuple(patches)
        self._required = tuple(required)
        self._applied: list[_Applied] = []

    @property
    def points(self) -> tuple[PatchPoint, ...]:
        """Every point this set relies on, replaced or only called."""
        return (*(patch.point for patch in self._patches), *self._required)

    @property
    def is_applied(self) -> bool:
        return bool(self._applied)

    def problems(self) -> list[str]:
        """Return one line for every point that is not as expected."""
        found = []
        for point in self.points:
            try:
                point.resolve()
            except PatchError as error:
                found.append(str(error))
        return found

    def apply(self) -> None:
        """Replace every target. Applying an applied set changes nothing.

        Raises:
            PatchError: A point is not as expected; nothing was replaced. Or this set
                was applied before, and somebody has put something else in the place
                of a replacement since.
        """
        if self._applied:
            if lost := self.lost():
                raise PatchError("; ".join(lost))
            return
        if problems := self.problems():
            raise PatchError("; ".join(problems))
        try:
            for patch in self._patches:
                owner, name, original = patch.point.resolve()
                applied = _Applied(
                    owner, name, original, patch.make(original), patch.everywhere
                )
                self._applied.append(applied)
                applied.replace()
        except BaseException:
            self._restore()
            raise

    def lost(self) -> list[str]:
        """One line for every replacement that calls do not get to any more.

        A wrapper around a replacement (``functools.wraps``) does not lose it.
        """
        return [
            f"{applied}: replaced after kvpad had patched it"
            for applied in self._applied
            if not applied.is_in_force
        ]

    def revert(self) -> None:
        """Put every original back. Reverting an unapplied set changes nothing.

        Raises:
            PatchError: Somebody else replaced one of the targets after this set did;
                restoring the original would silently remove their change, so nothing
                is restored.
        """
        wrapped = [
            str(applied)
            for applied in self._applied
            if applied.current is not applied.replacement
        ]
        if wrapped:
            raise PatchError(f"replaced by someone else since: {', '.join(wrapped)}")
        self._restore()

    def _restore(self) -> None:
        while self._applied:
            self._applied.pop().restore()


def absent(points: Iterable[PatchPoint]) -> list[str]:
    """One line for each of ``points`` that is not there, whatever its shape."""
    lines = []
    for point in points:
        try:
            point.find()
        except PatchError as error:
            lines.append(str(error))
    return lines


def check_together(patch_sets: Iterable[PatchSet]) -> None:
    """Check every point of several sets, and change nothing.

    Raises:
        PatchError: A point of one of them is not as expected, or a set that was
            applied before has lost a replacement.
    """
    # A set that is applied has its own replacements where its points were.
    problems = [
        line
        for each in patch_sets
        for line in (each.lost() if each.is_applied else each.problems())
    ]
    if problems:
        raise PatchError("; ".join(problems))


def apply_together(patch_sets: Sequence[PatchSet]) -> None:
    """Apply several sets, or none of them.

    Raises:
        PatchError: A point of one of them is not as expected, or a set that was
            applied before has lost a replacement; nothing was replaced.
    """
    check_together(patch_sets)
    pending = [each for each in patch_sets if not each.is_applied]
    for index, each in enumerate(pending):
        try:
            each.apply()
        except BaseException:
            for applied in pending[:index]:
                applied.revert()
            raise
