"""How often machines fail, from published runs."""

from trainyard.hardware.tables import rows

FAILURE_METRIC = "failure_rate"
FAILURE_SYSTEM = "RoCE 16k"


def failures_per_node_day() -> tuple[float, str]:
    """(unexpected interruptions per 8-GPU node and day, source): Llama 3's 54 days on 2,048 H100 nodes."""
    row = next(row for row in rows("failures") if row["metric"] == FAILURE_METRIC and row["system"] == FAILURE_SYSTEM)
    return float(row["value"]) / 1000, row["source"]
