"""DeepSpeed, without a second library that it would bring along."""

import importlib
import sys
from types import ModuleType
from typing import Any


def load_deepspeed() -> Any:
    """The package. Seconds to import: only jobs that use it pay.

    Its autotuner, which nothing here uses, imports MLflow where that is installed, with FastAPI and pandas: most of
    the seconds that DeepSpeed 0.19.8 takes beside torch, on every rank of every start.
    """
    if "deepspeed" in sys.modules:
        return importlib.import_module("deepspeed")
    before: ModuleType | None = sys.modules.get("mlflow")
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # Python's own word for "can't be imported"
    try:
        return importlib.import_module("deepspeed")
    finally:
        if before is None:
            del sys.modules["mlflow"]
        else:
            sys.modules["mlflow"] = before
