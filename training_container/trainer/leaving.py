"""How a rank's process ends. Imports no torch."""

import contextlib
import os
import sys
from typing import NoReturn

EXIT_RESUME_ME = 75
"""Stopped, progress saved, wants to be resumed: EX_TEMPFAIL of sysexits.h."""


def leave(exit_code: int) -> NoReturn:
    """Ends the process without tearing the interpreter down.

    gloo's worker threads outlive destroy_process_group, and while the interpreter goes down they may still ask for it:
    about one run in twenty then aborted ("terminate called without an active exception") after all work was done.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log whose disk is full changes no exit code
            stream.flush()
    os._exit(exit_code)
