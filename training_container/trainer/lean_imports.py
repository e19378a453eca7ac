"""What libraries import or work out for things that a rank seldom does, left until they are done. Imports no torch.

A start is mostly imports: 7 to 9 of a tiny job's seconds of processor, on every rank, and again at every restart. Here
is who takes some of them for nothing, found by `python -X importtime`; `trainer` installs it before anything else is
imported. Nothing is taken away: what is left out comes in when it is called. tests/trainer/test_library_traps.py holds
each of these against the library as it is, and fails once there is nothing to do any more.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Body = Callable[[ModuleType], AbstractContextManager[None]]
"""What is held around a module's body while it runs."""


def on_demand(module: str, *functions: str) -> Body:
    """While the body runs, `module` is a stand-in with these functions, which import the real one when called. Whatever
    else the body takes from it brings the real one at once."""

    @contextlib.contextmanager
    def held(_: ModuleType) -> Iterator[None]:
        if module in sys.modules:  # paid for already
            yield
            return
        stand_in = sys.modules[module] = _StandIn(module)
        for name in functions:
            setattr(stand_in, name, _calling(module, name))
        try:
            yield
        finally:
            if sys.modules.get(module) is stand_in:
                del sys.modules[module]

    return held


class _StandIn(ModuleType):
    """A module that isn't imported yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for some, of any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_real(self.__name__), name)


def _real(module: str) -> ModuleType:
    """The module itself, in its stand-in's place where that is still there."""
    if isinstance(sys.modules.get(module), _StandIn):
        del sys.modules[module]
    return importlib.import_module(module)


def _calling(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(_real(module), name)(*arguments, **named)

    return call


@contextlib.contextmanager
def compiled_when_called(_: ModuleType) -> Iterator[None]:
    """What the body decorates with DeepSpeed's `compile()` goes to torch.compile at its first call."""
    compiler: Any = None
    with contextlib.suppress(ImportError):
        compiler = importlib.import_module("deepspeed.runtime.compiler")
    theirs = getattr(compiler, "compile", None)
    if theirs is None:  # another version of it may compile in another way
        yield
        return
    compiler.compile = lambda: _compiling_later
    try:
        yield
    finally:
        compiler.compile = theirs


def _compiling_later(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call


@contextlib.contextmanager
def every_folder_read_once(import_utils: ModuleType) -> Iterator[None]:
    """transformers remembers what the folders of its models export, all of them and not the last 128."""
    yield
    # Another version of it may remember in another way, or read by another name.
    uncached = getattr(getattr(import_utils, "create_import_structure_from_path", None), "__wrapped__", None)
    if uncached is not None:
        import_utils.create_import_structure_from_path = functools.cache(uncached)  # type: ignore[attr-defined]


_ASSIGNMENT = on_demand("scipy.optimize", "linear_sum_assignment")
LEFT_OUT: dict[str, Body] = {
    # The losses of object detectors, which transformers imports with every model's: 0.5 s.
    **{
        f"transformers.loss.loss_{name}": _ASSIGNMENT
        for name in ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
    },
    # A quantizer for files that are read already quantized; it brings torchao and the inductor's decompositions: 0.6 s.
    "transformers.quantizers.quantizer_torchao": on_demand(
        "torchao.prototype.safetensors.safetensors_support",
        "flatten_tensor_state_dict",
        "unflatten_tensor_state_dict",
    ),
    # The sources of 549 folders are read for names, and read again, since 128 results are kept: 0.5 s.
    "transformers.utils.import_utils": every_folder_read_once,
    # The engine asks of every optimizer whether it is Muon, and that one's module is decorated with torch.compile,
    # which brings the whole inductor: 1,140 modules, 1.2 s.
    "deepspeed.runtime.zero.muon.original_muon": compiled_when_called,
}
"""Importing modules, and what is held around each. Seconds: processor time with torch 2.13 and transformers 5.23."""


class _Held(Loader):
    """A module's own loader, with something held around the body."""

    def __init__(self, loader: Loader, body: Body) -> None:
        self._loader = loader
        self._body = body

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._body(module):
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made, `_loader` isn't there yet
            raise AttributeError(name)
        return getattr(self._loader, name)  # sources for tracebacks, data files


class LeanFinder(MetaPathFinder):
    """Finds the modules of LEFT_OUT where they are, and no other."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        body = LEFT_OUT.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if body else None
        if body and spec and spec.loader:
            spec.loader = _Held(spec.loader, body)
        return spec


def install() -> None:
    """Once a process; a second call changes nothing."""
    if not any(isinstance(finder, LeanFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LeanFinder())
