"""The CSV files of this folder as typed rows. Each row of them names its source."""

import csv
import functools
from importlib import resources


@functools.cache
def rows(table: str) -> tuple[dict[str, str], ...]:
    """The rows of `<table>.csv`, read once."""
    text = resources.files("trainyard.hardware").joinpath(f"{table}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@functools.cache
def specifications() -> dict[str, dict[str, tuple[float, str]]]:
    """{GPU or instance type: {metric: (value, source)}} of both GPU tables; the first table wins where both speak."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for row in (*rows("gpu_specs"), *rows("gpu_datasheets")):
        # Some cells explain themselves after the number: "192.3 (moto 183359 MiB)".
        value = float(row["value"].split()[0])
        found.setdefault(row["gpu_or_instance"], {}).setdefault(row["metric"], (value, row["source"]))
    return found
