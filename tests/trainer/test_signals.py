"""Signals heard by one rank are agreed on by all."""

import os
import signal
import sys

import torch.distributed as dist
from trainer.early_save import note_early_saves
from trainer.signals import StopFlag
from trainer_testing.pool import run_pooled


def test_each_signal_is_one_decision() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag(None) as flag:
        assert flag.agreed(1) == "none"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert flag.agreed(2) == "save"
        assert flag.agreed(3) == "none"
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert flag.agreed(4) == "save_and_exit"
        assert flag.agreed(5) == "save_and_exit"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_save_that_was_asked_for_before_anybody_listened_is_the_first_steps() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    note_early_saves()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopFlag(None) as flag:
            assert [flag.agreed(step) for step in (1, 2)] == ["save", "none"]
        os.kill(os.getpid(), signal.SIGUSR1)  # nor does it end who listens no more
        with StopFlag(None) as flag:
            assert flag.agreed(3) == "save"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_request_counts_like_a_signal() -> None:
    flag = StopFlag(None)
    flag.request("save")
    flag.request("none")
    assert flag.agreed(1) == "save"


def test_a_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    outputs = run_pooled(3, "test_signals", timeout_seconds=600)
    assert [output.split() for output in outputs] == [["2:save:False", "4:save_and_exit:True"]] * 3


def rank_main() -> None:
    """Rank 1 hears SIGUSR1 in step 2, rank 2 SIGTERM in step 4; every rank prints what was agreed when, and before."""
    dist.init_process_group("gloo")
    with StopFlag(dist.group.WORLD) as flag:
        for step in range(1, 6):
            if (dist.get_rank(), step) == (1, 2):
                os.kill(os.getpid(), signal.SIGUSR1)
            if (dist.get_rank(), step) == (2, 4):
                os.kill(os.getpid(), signal.SIGTERM)
            must_exit = flag.must_exit()
            decision = flag.agreed(step)
            if decision != "none":
                print(f"{step}:{decision}:{must_exit}", flush=True)
            if decision == "save_and_exit":
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main()
    sys.exit(0)
