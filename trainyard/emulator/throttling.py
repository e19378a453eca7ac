"""Calls that are refused for their number, on demand: how a client takes it can't be seen otherwise."""

import re
import threading
from collections.abc import Mapping
from typing import Any

_MAX_CALLS = 10_000


class Throttle:
    """How many of the next calls of each action are refused as too many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}

    def plan(self, request: Mapping[str, Any]) -> dict[str, int]:
        """`{"action": "pricing:GetProducts", "calls": 2}`, in place of what was planned for it; ValueError."""
        action, calls = request.get("action"), request.get("calls")
        if set(request) != {"action", "calls"} or not re.fullmatch(r"[a-z0-9-]+:[A-Za-z0-9]+", str(action)):
            raise ValueError('the body must be {"action": "SERVICE:OPERATION", "calls": N}')
        if not isinstance(calls, int) or not 0 <= calls <= _MAX_CALLS:
            raise ValueError(f"calls {calls} must be a number from 0 to {_MAX_CALLS}")
        with self._lock:
            self._left[str(action)] = calls
        return {str(action): calls}

    def refuses(self, action: str) -> bool:
        """Whether this call is one too many; it counts."""
        with self._lock:
            left = self._left.get(action, 0)
            if left:
                self._left[action] = left - 1
            return left > 0
