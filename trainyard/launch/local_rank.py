"""`python -m trainyard.launch.local_rank --output-dir DIR ...`: one rank of a local job, tied to its torchrun.

The trainer itself, with its arguments passed on, started so that it never outlives the torchrun that watches it, and so
that a SIGTERM before the trainer listens for one is a stop too, not a crash.
"""

import ctypes
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

RESUME_FILE = "resume_me"
"""In the trainer's output folder: it was told to stop, and can be resumed (torchrun exits 1 whatever its ranks say)."""
RESUME_EXIT_CODE = 75
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """SIGKILL for this process when its parent is gone (Linux only), so that no orphan writes where a resume does."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)


def say_whole(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The last words of a rank in a single write: the ranks share one log, and Python's own hook writes by the word."""
    text = "".join(traceback.format_exception(kind, error, trace)).encode(errors="backslashreplace")
    sys.stdout.flush()
    while text:
        text = text[os.write(sys.stderr.fileno(), text) :]


def main() -> None:
    """Become the trainer: `runpy` runs it as `python -m trainer` would, with this process's arguments."""
    die_with_parent()
    sys.excepthook = say_whole
    output_dir = Path(sys.argv[sys.argv.index("--output-dir") + 1])

    def leave(_signal: int, _frame: FrameType | None) -> NoReturn:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / RESUME_FILE).touch()
        print("told to stop before the first step: nothing new to save", flush=True)
        os._exit(RESUME_EXIT_CODE)

    # The trainer puts its own handler here once it can save.
    signal.signal(signal.SIGTERM, leave)
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
