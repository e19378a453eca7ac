"""torch's flight recorder: the newest collectives of this rank, for a profile, or for a host whose ranks hang.

The recorder keeps the newest 2000 of a rank (the variable TORCH_FR_BUFFER_SIZE changes that) with their sizes and
states. What gloo carries and what NCCL carries are two recorders of one form (FlightRecorder.hpp, version 2.10).
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer import heartbeat
from trainer.host.standings import ASK_FILE, Standing, answer_file
from trainer.rendezvous import PATIENT

_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_LOOK_SECONDS = 0.5
_CALLS_TOLD = 20
"""Of a group: what two ranks may be apart, where each waits for the other."""
_UNEVEN = ("all_to_all", "alltoall", "scatter")
"""What ranks may call with sizes of their own."""


def flight_record() -> dict[str, Any]:
    """The newest collectives, by who carries them: gloo (on CPUs) and nccl, as far as this torch can tell.

    `groups`: the ranks of each process group by its name, which gloo's record lacks (`pg_config` is empty there).
    """
    library: Any = torch._C._distributed_c10d
    dumps = {name: getattr(library, function, None) for name, function in _DUMPS.items()}
    told = {name: json.loads(dump()) for name, dump in dumps.items() if dump is not None}
    names = dict(dist.distributed_c10d._world.pg_names)
    return told | {"groups": {name: dist.get_process_group_ranks(group) for group, name in names.items()}}


def standing_of(record: Mapping[str, Any]) -> Standing:
    """Where this rank stands in each of its process groups, from a flight record.

    The group of saves on their way is left out: who waits there for a slow upload keeps nobody from training. Of
    messages between two ranks it is told only whether one has not ended. Those that NCCL sends together are entries of
    one number, of which the last stands for all and alone is ever completed.
    """
    standing: Standing = {}
    is_sent: dict[tuple[str, int], bool] = {}
    for carrier in _DUMPS:
        for entry in record.get(carrier, {}).get("entries", []):
            name, description = entry["process_group"]
            ranks = record["groups"].get(name, [])
            if description == PATIENT or len(ranks) < 2:
                continue
            has_ended = entry["retired"] or entry["state"] == "completed"
            group = standing.setdefault(f"{carrier} {name}", {"ranks": ranks, "last": -1, "calls": {}, "open": []})
            if entry["is_p2p"]:
                is_sent[f"{carrier} {name}", int(entry["p2p_seq_id"])] = has_ended
                continue
            number = int(entry["collective_seq_id"])
            group["last"] = max(group["last"], number)
            group["calls"][str(number)] = _words(entry)
            if not has_ended:
                group["open"].append(number)
    for (key, _), has_ended in is_sent.items():
        if not has_ended:
            standing[key]["messages"] = True
    for group in standing.values():
        group["calls"] = dict(list(group["calls"].items())[-_CALLS_TOLD:])
    return standing


def _words(entry: Mapping[str, Any]) -> str:
    """`all_reduce of 32x64 Float`: what has to be the same on all ranks."""
    operation = str(entry["profiling_name"]).rpartition(":")[2].strip("_")
    if operation.startswith(_UNEVEN):
        return operation
    sizes = ["x".join(map(str, size)) or "1" for size in entry["input_sizes"]]
    types = sorted(set(entry["input_dtypes"]))
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return f"{operation} of {sizes[0]}{more} {'/'.join(types)}" if sizes else operation


@contextlib.contextmanager
def told_when_asked() -> Iterator[None]:
    """Within the block a thread answers the host, where one listens: the main thread may hang in a collective."""
    own = os.environ.get(heartbeat.FILE_VARIABLE)
    if own is None:
        yield
        return
    over = threading.Event()
    place = (Path(own).parent, int(os.environ["RANK"]))
    thread = threading.Thread(target=_answer, args=(*place, over), name="collectives", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1.0)


def _answer(folder: Path, rank: int, over: threading.Event) -> None:
    while not over.wait(_LOOK_SECONDS):
        if (folder / ASK_FILE).exists():
            # A full disk, or a recorder of another form, costs the answer, not the rank.
            with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
                record = flight_record()
                partial = folder / f".collectives-{rank}"
                partial.write_text(json.dumps({"standing": standing_of(record), "record": record}), encoding="utf-8")
                partial.replace(answer_file(folder, rank))
            return
