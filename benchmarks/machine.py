"""What a result was measured on, and that its disk was really asked."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "accelerate", "peft", "torchao", "deepspeed")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPU with its limits, versions, load and date: what another run is compared by."""
    gpu = _gpu() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_1_minute": round(os.getloadavg()[0], 2),
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def drop_from_page_cache(path: Path) -> None:
    """Make the disk, not the page cache, answer for a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # a page that isn't written can't be dropped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def file_name(description: dict[str, Any]) -> str:
    """A name for the machine that a file's name can hold: `amd-epyc-2-cores`, `nvidia-h200`."""
    words = description["gpu"]["name"] if description["gpu"] else f"{description['cpu']} {description['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = "power.limit,clocks.max.sm,driver_version"
    command = ["nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        answer = "not known: nvidia-smi does not answer"
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        query: answer,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of this source tree; None where it is no git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
