"""A GPU as its driver tells of it, through NVML's own C interface: a stand-in of the library, as no GPU is at hand."""

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_observe_figures import figures
from trainer.observe import gpu_use, nvml
from trainer.observe.gpu_use import MOST_LINES, GpuShares, GpuUse, gpu_use_of
from trainer.observe.nvml import FALLEN_OFF, Reading, open_gpu
from trainer.observe.observer import summary

from trainyard.operate.runbooks.log_lines import classify, xids
from trainyard.spec.meters import BY_NAME

UUID = "4b3c0f0e-8a5b-11ee-b9d1-0242ac120002"
HANDLE = 0x7F00_DEAD_BEEF
"""Beyond 32 bits: a handle that is passed on as an int would be cut."""
SUCCESS, NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST = 0, 3, 10, 15
PLACE, NUMBER = ctypes.c_void_p, ctypes.c_uint


class Driver:
    """libnvidia-ml.so.1 with one GPU: functions of C's calling convention, which write where they are told to."""

    def __init__(self) -> None:
        self.utilization, self.memory, self.reasons = 90, (80 << 30, 20 << 30), 0x4
        self.xids: list[int] = []
        self.waits: int = TIMEOUT
        self.lacks: set[str] = set()
        self.asked: list[str] = []
        self.nvmlInit_v2 = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: SUCCESS)
        self.nvmlDeviceGetHandleByUUID = self._function(self._handle, ctypes.c_char_p, PLACE)
        self.nvmlDeviceGetUtilizationRates = self._of_gpu(self._utilization)
        self.nvmlDeviceGetMemoryInfo = self._of_gpu(self._memory)
        self.nvmlDeviceGetCurrentClocksThrottleReasons = self._of_gpu(self._reasons)
        self.nvmlEventSetCreate = self._function(lambda place: self._put(place, ctypes.c_void_p, 0x5E7), PLACE)
        self.nvmlDeviceRegisterEvents = self._function(self._register, PLACE, ctypes.c_ulonglong, PLACE)
        self.nvmlEventSetWait_v2 = self._function(self._wait, PLACE, PLACE, NUMBER)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.lacks:
            raise AttributeError(name)
        return super().__getattribute__(name)

    @staticmethod
    def _function(answer: Callable[..., int], *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(answer)

    def _of_gpu(self, answer: Callable[[int], int]) -> Any:
        return self._function(lambda handle, place: answer(place) if handle == HANDLE else NOT_SUPPORTED, PLACE, PLACE)

    @staticmethod
    def _put(place: int, kind: Any, value: int) -> int:
        ctypes.cast(place, ctypes.POINTER(kind))[0] = value
        return SUCCESS

    def _handle(self, uuid: bytes, place: int) -> int:
        self.asked.append(uuid.decode())
        return self._put(place, ctypes.c_void_p, HANDLE) if uuid.decode() == f"GPU-{UUID}" else 6

    def _utilization(self, place: int) -> int:
        both = ctypes.cast(place, ctypes.POINTER(NUMBER))
        both[0], both[1] = self.utilization, 17
        return SUCCESS

    def _memory(self, place: int) -> int:
        total, free = self.memory
        told = ctypes.cast(place, ctypes.POINTER(ctypes.c_ulonglong))
        told[0], told[1], told[2] = total, free, total - free
        return SUCCESS

    def _reasons(self, place: int) -> int:
        return self._put(place, ctypes.c_ulonglong, self.reasons)

    def _register(self, handle: int, kinds: int, events: int) -> int:
        return SUCCESS if (handle, kinds, events) == (HANDLE, 8, 0x5E7) else NOT_SUPPORTED

    def _wait(self, events: int, place: int, milliseconds: int) -> int:
        if not self.xids:
            time.sleep(milliseconds / 1000)
            return self.waits
        # nvmlEventData_t: a pointer, the kind, the Xid, and two numbers of a MIG slice.
        told = ctypes.cast(place, ctypes.POINTER(ctypes.c_ulonglong))
        told[0], told[1], told[2] = HANDLE, 8, self.xids.pop(0)
        return SUCCESS


def test_what_the_driver_tells_is_read() -> None:
    driver = Driver()
    gpu = open_gpu(UUID, driver)
    assert gpu is not None and driver.asked == [f"GPU-{UUID}"]
    # At the software's power cap a GPU is as fast as planned.
    assert gpu.read() == Reading(utilization=0.9, memory=0.75, is_held_back=False)
    for reason in (0x8, 0x20, 0x40, 0x80):
        driver.reasons = 0x4 | reason
        assert gpu.read().is_held_back


def test_what_it_does_not_tell_is_none_and_no_zero() -> None:
    driver = Driver()
    driver.lacks = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlEventSetCreate"}
    gpu = open_gpu(f"GPU-{UUID}", driver)
    assert gpu is not None and not gpu.tells_xids
    assert gpu.read() == Reading(utilization=None, memory=0.75, is_held_back=None)
    assert gpu.wait_for_xid(60.0) is None, "at once"
    assert open_gpu("another", driver) is None
    driver.lacks = {"nvmlInit_v2"}
    assert open_gpu(UUID, driver) is None


def test_an_xid_is_told_and_a_lost_gpu_is_one_that_fell_off_the_bus() -> None:
    driver = Driver()
    driver.xids = [63]
    gpu = open_gpu(UUID, driver)
    assert gpu is not None and gpu.wait_for_xid(60.0) == 63
    assert gpu.wait_for_xid(0.001) is None and gpu.tells_xids
    driver.waits = GPU_IS_LOST
    assert gpu.wait_for_xid(0.001) == FALLEN_OFF
    assert not gpu.tells_xids and gpu.wait_for_xid(60.0) is None, "else told again and again, without a wait"


def sampled(driver: Driver, until: Callable[[GpuUse], object]) -> GpuUse:
    gpu = open_gpu(UUID, driver)
    assert gpu is not None
    use = GpuUse(gpu, rank=3, every_seconds=0.001)
    deadline = time.monotonic() + 60
    while not until(use):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return use


def ended(use: GpuUse) -> GpuUse:
    use.close()
    use._thread.join(60)
    assert not use._thread.is_alive()
    return use


def test_a_window_has_its_means_and_the_next_one_begins_anew() -> None:
    driver = Driver()
    driver.utilization, driver.memory, driver.reasons = 50, (100, 10), 0x40
    use = ended(sampled(driver, lambda use: len(use._readings) > 2))
    assert use.take() == GpuShares(utilization=0.5, memory_peak=0.9, held_back=1.0)
    driver.utilization, driver.memory, driver.reasons = 100, (100, 75), 0
    assert use.take() == GpuShares(utilization=1.0, memory_peak=0.25, held_back=0.0), "too short a window for a sample"
    use._readings = [Reading(1.0, 0.2, False), Reading(0.5, 0.4, True), Reading(None, None, None)]
    assert use.take() == GpuShares(utilization=0.75, memory_peak=0.4, held_back=0.5)


def test_the_line_of_an_xid_is_one_that_the_runbook_reads(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver()
    driver.xids = [94, *[31] * (MOST_LINES + 5)]
    driver.waits = GPU_IS_LOST
    ended(sampled(driver, lambda use: not use._gpu.tells_xids))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("xid=")[1] for line in lines] == [
        "94",
        *["31"] * (MOST_LINES - 1),
        "31, and no more of these",
        "79",
    ]
    seen = xids(lines)
    assert [one.code for one in seen] == [94, *[31] * MOST_LINES, 79]
    assert seen[0].gpu.startswith("rank 3's GPU on ")
    assert [hit.name for hit in classify(lines)] == ["xid-79"]


def test_a_rank_on_a_gpu_asks_for_its_own_and_one_without_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_use_of(torch.device("cpu"), rank=0) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    driver = Driver()
    monkeypatch.setattr(gpu_use, "open_gpu", lambda uuid: open_gpu(uuid, driver))
    use = gpu_use_of(torch.device("cuda", 1), rank=1)
    assert use is not None and driver.asked == [f"GPU-{UUID}"]
    use.close()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(nvml, "LIBRARY", "libno-driver.so.1")
    monkeypatch.setattr(gpu_use, "open_gpu", open_gpu)
    assert gpu_use_of(torch.device("cuda", 1), rank=1) is None
    assert "gpu rank=1: its driver answers no questions" in capsys.readouterr().out


def test_the_jobs_figure_is_the_mean_and_of_the_worst_it_is_told_which() -> None:
    ranks = [
        figures(1.0, gpu=GpuShares(0.9, 0.5, 0.0)),
        figures(1.0, host="algo-2", gpu=GpuShares(0.5, 0.75, 0.6)),
        figures(1.0, gpu=GpuShares(None, None, None)),
    ]
    row = {"observed": summary(50, ranks)}
    assert row["observed"]["gpu"] == {
        "utilization": pytest.approx(0.7),
        "memory_peak": 0.75,
        "held_back": 0.6,
        "held_back_rank": 1,
        "held_back_host": "algo-2",
    }
    assert BY_NAME["gpu_utilization"].read(row) == pytest.approx(0.7)
    assert (BY_NAME["gpu_held_back"].read(row), BY_NAME["gpu_memory_share"].read(row)) == (0.6, 0.75)
    assert summary(50, [figures(1.0)])["gpu"] is None
