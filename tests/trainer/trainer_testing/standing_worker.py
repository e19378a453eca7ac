"""Two ranks of which one is missing in a collective, or calls another one: `standing_worker FOLDER missing|other`."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from trainer import heartbeat
from trainer.observe.flight_recorder import told_when_asked


def main(folder: Path, how: str) -> None:
    """Both finish one all_reduce; then rank 0 waits in a second one, for ever."""
    rank = int(os.environ["RANK"])
    os.environ[heartbeat.FILE_VARIABLE] = str(folder / f"heartbeat-{rank}")
    with told_when_asked():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2, 3))
        if rank == 0:
            work = dist.all_reduce(torch.ones(8), async_op=True)
        elif how == "other":
            work = dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), async_op=True)
        (folder / f"called-{rank}").touch()
        if rank == 0 or how == "other":
            work.wait()
        time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
