"""One GPU as its driver sees it (NVML): use, memory, clocks that are held back, and errors by their Xid.

By ctypes on libnvidia-ml.so.1, which belongs to the driver and is in every container that may use a GPU; no package
is needed. Names, structures and numbers are those of NVIDIA's NVML API reference (docs.nvidia.com/deploy/nvml-api).
What a GPU doesn't answer (a MIG slice tells no use, for instance) is None. No torch here.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
HELD_BACK = 0x8 | 0x20 | 0x40 | 0x80
"""Of the reasons for lower clocks: slowed down by the hardware, for heat (by software or hardware), by the power brake.
The software's power cap (0x4) is not among them: a GPU that computes hard is at it, and it is as fast as planned."""
FALLEN_OFF = 79
"""The Xid of a GPU that the driver has lost."""

_SUCCESS, _TIMEOUT, _GPU_IS_LOST = 0, 10, 15
_XID_EVENT = 0x8


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment."""

    utilization: float | None
    """Share of the driver's last sample (a sixth of a second to one) in which a kernel ran, however small."""
    memory: float | None
    """Share of its memory that is taken, by whomever: NCCL's buffers and other processes too."""
    is_held_back: bool | None
    """Whether heat, the power brake or the hardware keep its clocks down."""


class NvmlGpu:
    """One GPU of this machine."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        """`library`: initialized, as `open_gpu` does it."""
        self._library = library
        self._handle = handle
        self._events = self._registered()

    def read(self) -> Reading:
        """What it does now; waits for nothing but the driver."""
        used, memory, reasons = _Utilization(), _Memory(), ctypes.c_ulonglong()
        has_used = self._ask("nvmlDeviceGetUtilizationRates", used)
        has_memory = self._ask("nvmlDeviceGetMemoryInfo", memory) and memory.total > 0
        has_reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", reasons)
        return Reading(
            used.gpu / 100 if has_used else None,
            memory.used / memory.total if has_memory else None,
            bool(reasons.value & HELD_BACK) if has_reasons else None,
        )

    def _ask(self, question: str, answer: Any) -> bool:
        return _call(self._library, question, self._handle, ctypes.byref(answer)) == _SUCCESS

    def _registered(self) -> ctypes.c_void_p | None:
        """A set of events that gets this GPU's Xids; None where the driver tells none."""
        events = ctypes.c_void_p()
        if _call(self._library, "nvmlEventSetCreate", ctypes.byref(events)) != _SUCCESS:
            return None
        kinds = ctypes.c_ulonglong(_XID_EVENT)
        answer = _call(self._library, "nvmlDeviceRegisterEvents", self._handle, kinds, events)
        return events if answer == _SUCCESS else None

    @property
    def tells_xids(self) -> bool:
        """Whether `wait_for_xid` waits; it is over for good once a GPU is lost or the driver has gone away."""
        return self._events is not None

    def wait_for_xid(self, seconds: float) -> int | None:
        """The next Xid of this GPU within so many seconds, as soon as it comes; None: none came."""
        if self._events is None:
            return None
        event, milliseconds = _Event(), ctypes.c_uint(int(1000 * seconds))
        answer = _call(self._library, "nvmlEventSetWait_v2", self._events, ctypes.byref(event), milliseconds)
        if answer == _SUCCESS:
            return int(event.data) if event.kind == _XID_EVENT else None
        if answer != _TIMEOUT:
            self._events = None
        return FALLEN_OFF if answer == _GPU_IS_LOST else None


def open_gpu(uuid: str, library: Any = None) -> NvmlGpu | None:
    """The GPU with this UUID (with or without `GPU-` before it); None where there is no driver, or it knows no such.

    By UUID, because CUDA_VISIBLE_DEVICES numbers GPUs anew and NVML doesn't.
    """
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = ctypes.c_void_p()
    if _call(library, "nvmlInit_v2") != _SUCCESS:
        return None
    if _call(library, "nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name.encode()), ctypes.byref(handle)) != _SUCCESS:
        return None
    return NvmlGpu(library, handle)


def _call(library: Any, function: str, *arguments: Any) -> int:
    """NVML's answer; -1 where this driver has no such function."""
    try:
        called = getattr(library, function)
    except AttributeError:
        return -1
    return int(called(*arguments))
