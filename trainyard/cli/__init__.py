"""The `trainyard` command: one file per group of verbs, each verb thin over trainyard.planner, .launch, .operate.

Exit codes: 0 done, 1 the job or check failed, 2 the input was wrong, 3 AWS refused, 130 interrupted (by SIGTERM too).
Errors are one line on stderr. Libraries that take long to import are imported by the verb that needs them: `--help` is
instant.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (sys.argv by default) and exit with its code."""
    import gc
    import signal
    import sys

    _open_closed_streams()
    # Most of a verb's time is imports: of boto3, of the SageMaker SDK. What they make stays, and by Python's own rule
    # (700 new objects) the collector would look through all of it again and again: a tenth to a fifth of the time.
    gc.set_threshold(100_000)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's, and whoever set them otherwise, stay
            signal.signal(number, _end_as_interrupted)
    try:
        from trainyard.cli.app import run

        sys.exit(run(arguments))
    except KeyboardInterrupt:  # `run` answers its own; this came while it was imported, or as it ended
        sys.exit(130)


def _end_as_interrupted(_number: int, _frame: object) -> None:
    """SIGTERM (`timeout`, a cancelled CI job) and a terminal that goes away take the same way out as Ctrl-C: what the
    verb started is ended, what it wrote for itself is removed."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in a shell's background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _open_closed_streams() -> None:
    """Whoever closed a stream (`trainyard ... >&-`, some service managers) wants none: it leads nowhere, instead of to
    the first file that is opened, which would get its number."""
    import os
    import sys

    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
