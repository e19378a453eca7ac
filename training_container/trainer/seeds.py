"""Random numbers: seeded alike everywhere for the weights, apart per rank for dropout, saved and restored exactly."""

import base64
import os
import random
from typing import Any

import numpy as np
import torch

_RANK_STRIDE = 1_000_003
"""Keeps the ranks' dropout streams apart for neighbouring seeds too: a prime far above any rank count's need."""


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seeds Python, NumPy and torch (all devices) for one rank; rank 0's stream is the seed's own."""
    rank_seed = seed + _RANK_STRIDE * rank
    random.seed(rank_seed)
    np.random.seed(rank_seed % 2**32)
    torch.manual_seed(rank_seed)


def use_deterministic_kernels() -> None:
    """Only kernels that give the same bits every time; some operations get slower, one without such a kernel raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def use_any_kernels() -> None:
    """The fastest kernels again."""
    torch.use_deterministic_algorithms(False)


def rng_state() -> dict[str, Any]:
    """This rank's generators as JSON values: Python, NumPy, torch on CPU and, where there is one, on its GPU."""
    python_version, python_words, python_gauss = random.getstate()
    numpy_name, numpy_words, numpy_position, numpy_has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    assert numpy_name == "MT19937"
    return {
        "python": [python_version, _encode(np.array(python_words, dtype=np.uint32)), python_gauss],
        "numpy": [_encode(np.asarray(numpy_words, dtype=np.uint32)), numpy_position, numpy_has_gauss, numpy_gauss],
        "torch": _encode(torch.get_rng_state().numpy()),
        "cuda": _encode(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_available() else None,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave."""
    python_version, python_words, python_gauss = state["python"]
    random.setstate((python_version, tuple(_decode(python_words, np.uint32).tolist()), python_gauss))
    numpy_words, numpy_position, numpy_has_gauss, numpy_gauss = state["numpy"]
    np.random.set_state(("MT19937", _decode(numpy_words, np.uint32), numpy_position, numpy_has_gauss, numpy_gauss))
    torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_decode(state["cuda"], np.uint8)))


def _encode(words: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(words).tobytes()).decode("ascii")


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
