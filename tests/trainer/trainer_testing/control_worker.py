"""One rank of the tests of process control: a rendezvous that fails once, and collectives that lose patience."""

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from trainer.leaving import leave
from trainer.rendezvous import PATIENT, limit_collectives
from trainer.runtime import Runtime, distributed_runtime


def retry() -> None:
    """The first try fails, as gloo's sometimes does; then all ranks try again."""
    honest = dist.init_process_group
    tries: list[int] = []

    def init(*arguments: Any, **options: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            # gloo may fail before or after it has counted the group; where one rank hears of it late, it waits long.
            dist.distributed_c10d._world.group_count += options["rank"]
            raise dist.DistBackendError("connectFullMesh failed")
        honest(*arguments, **options)

    dist.init_process_group = init
    with distributed_runtime(cpu_threads=1) as runtime:
        print(f"sum={runtime.sum_over_ranks(1.0)[0]} tries={len(tries)}", flush=True)
        shrink(runtime)


def shrink(runtime: Runtime) -> None:
    """Rank 1 is late: by three seconds, for a group that waits on and with a limit far above; then, with one far
    below, until rank 0 has given up."""
    store = dist.distributed_c10d._get_default_store()
    patient = dist.new_group(backend="gloo", group_desc=PATIENT)
    limit_collectives(0.8)
    if runtime.rank == 1:
        time.sleep(3)
    dist.barrier(group=patient)
    print("patient", flush=True)
    limit_collectives(60)
    if runtime.rank == 1:
        time.sleep(3)
    print(f"sum={runtime.sum_over_ranks(1.0)[0]}", flush=True)
    limit_collectives(0.8)
    with contextlib.suppress(RuntimeError):  # rank 0, whose store it is, may be gone already
        if runtime.rank == 1:
            store.wait(["gave up"], timedelta(seconds=300))
    try:
        runtime.sum_over_ranks(1.0)
    except RuntimeError as error:
        print(f"gave up: {error}", flush=True)
        if runtime.is_first:
            store.set("gave up", "1")


if __name__ == "__main__":
    retry()
    leave(0)
