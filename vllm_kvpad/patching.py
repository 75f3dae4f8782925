"""Named, checked, reversible changes to a package that is already imported.

A :class:`Patch` is data: what it replaces, the parameters the target must have, and
how the replacement is made from the original. A :class:`PatchSet` is applied whole
or not at all: every target is looked up and its signature compared before the first
one is replaced, so a host that changed in one place is left exactly as it was.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class PatchError(RuntimeError):
    """A patch point is missing, has another signature, or cannot be restored."""


@dataclass(frozen=True)
class PatchPoint:
    """A function, method or property of another package, and its expected shape.

    Attributes:
        target: ``"package.module:Qualified.name"``.
        parameters: Names of its parameters in order, ``self`` included. For a
            property, those of its getter.
    """

    target: str
    parameters: tuple[str, ...]

    def resolve(self) -> tuple[Any, str, Any]:
        """Return the owner, the attribute's name and its current value.

        The value is the attribute as it stands in the owner's own namespace, so a
        property is returned as the property object.

        Raises:
            PatchError: The module cannot be imported, the name is missing, or the
                parameters differ; the message names the target and what was found.
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
        found = _parameters(value)
        if found != self.parameters:
            raise PatchError(
                f"{self.target}: takes ({', '.join(found)}), "
                f"expected ({', '.join(self.parameters)})"
            )
        return owner, name, value


def _parameters(value: Any) -> tuple[str, ...]:
    if isinstance(value, property):
        value = value.fget
    if not callable(value):
        return (f"<{type(value).__name__}>",)
    return tuple(inspect.signature(value).parameters)


@dataclass(frozen=True)
class Patch:
    """One replacement: ``make(original)`` returns what takes the original's place."""

    point: PatchPoint
    make: Callable[[Any], Any]


@dataclass(frozen=True)
class _Applied:
    owner: Any
    name: str
    original: Any
    replacement: Any

    def restore(self) -> None:
        setattr(self.owner, self.name, self.original)


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
            PatchError: A point is not as expected; nothing was replaced.
        """
        if self._applied:
            return
        if problems := self.problems():
            raise PatchError("; ".join(problems))
        try:
            for patch in self._patches:
                owner, name, original = patch.point.resolve()
                replacement = patch.make(original)
                setattr(owner, name, replacement)
                self._applied.append(_Applied(owner, name, original, replacement))
        except BaseException:
            self._restore()
            raise

    def revert(self) -> None:
        """Put every original back. Reverting an unapplied set changes nothing.

        Raises:
            PatchError: Somebody else replaced one of the targets after this set did;
                restoring the original would silently remove their change, so nothing
                is restored.
        """
        wrapped = [
            f"{applied.owner.__name__}.{applied.name}"
            for applied in self._applied
            if inspect.getattr_static(applied.owner, applied.name, None)
            is not applied.replacement
        ]
        if wrapped:
            raise PatchError(f"replaced by someone else since: {', '.join(wrapped)}")
        self._restore()

    def _restore(self) -> None:
        while self._applied:
            self._applied.pop().restore()
