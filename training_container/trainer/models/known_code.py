"""Modules of the library's that are computed in another way, where their code is known line by line.

By bytecode: what upstream changes falls back to its own code. A changed module has a class like its own, also by its
name, as FSDP does it; pickled and copied it is the library's, changed again when it is read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def is_known(kind: type[nn.Module], known: Sequence[type[nn.Module]]) -> bool:
    """Whether a class's forward pass is that of one of `known`: of other code nothing is assumed."""
    lines = _lines(kind)
    return lines is not None and lines in [_lines(each) for each in known]


def _lines(kind: type[nn.Module]) -> list[tuple[Any, ...]] | None:
    """What a class's forward pass does, and what it calls of its own, but for documentation; None: no Python code."""
    found = []
    for name in ("forward", "_norm"):
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is not None:
            if code.co_freevars:  # a decorator's, which says nothing of what it wraps
                return None
            constants = [each for each in code.co_consts if not isinstance(each, str)]
            found.append((name, code.co_code, code.co_names, code.co_varnames, constants))
    return found or None


def class_like(kind: Any, forward: Callable[..., Any], made_again: Callable[[Any], Any]) -> Any:
    """A class like `kind` with another forward pass; `made_again(kind)` gives it to who reads a pickle."""

    def reduced(self: Any, _: Any) -> Any:
        return _bare, (made_again, kind), self.__dict__  # by the library's class, which a pickle can name

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": reduced, **names})


def _bare(made_again: Callable[[Any], Any], kind: Any) -> Any:
    changed = made_again(kind)
    return changed.__new__(changed)
