"""A value that an object reckons when it is first asked for, and keeps."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class once(Generic[Value]):  # a decorator, as `property` is
    """functools.cached_property, but for the lock that this takes before Python 3.12: a search of layouts reckons some
    sixty small values for each, of which many cost less than the lock."""

    def __init__(self, reckon: Callable[[Any], Value]) -> None:
        self._reckon, self.__doc__ = reckon, reckon.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "once[Value]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> "once[Value] | Value":
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._reckon(instance)
        return found
