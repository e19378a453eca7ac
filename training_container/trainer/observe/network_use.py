"""What a host sends and receives while its ranks train, as its kernel counts it."""

import time
from pathlib import Path

PROC_NET = Path("/proc/net/dev")
INFINIBAND = Path("/sys/class/infiniband")
"""EFA's devices are here; their traffic passes the kernel by, and /proc/net/dev doesn't see it."""


class NetworkUse:
    """Bytes a second between two calls, all cards of the host together, without loopback."""

    def __init__(self, *, proc_net: Path = PROC_NET, infiniband: Path = INFINIBAND) -> None:
        self._proc_net, self._infiniband = proc_net, infiniband
        self._before = (time.monotonic(), *self.counted())

    def rates(self) -> tuple[float, float]:
        """(sent, received) bytes a second since the last call; zeros where nothing can be read."""
        now = (time.monotonic(), *self.counted())
        before, self._before = self._before, now
        seconds = max(now[0] - before[0], 1e-9)
        # A card that was replaced or reset counts from 0 again.
        return max(0.0, (now[1] - before[1]) / seconds), max(0.0, (now[2] - before[2]) / seconds)

    def counted(self) -> tuple[int, int]:
        """(sent, received) bytes since the host started."""
        sent = received = 0
        for line in _text(self._proc_net).splitlines()[2:]:  # two lines of headings
            card, _, figures = line.partition(":")
            fields = figures.split()
            if card.strip() != "lo" and len(fields) > 8:
                received, sent = received + int(fields[0]), sent + int(fields[8])
        for counters in sorted(self._infiniband.glob("*/ports/*/hw_counters")):
            sent += _number(counters / "tx_bytes")
            received += _number(counters / "rx_bytes")
        return sent, received


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0
