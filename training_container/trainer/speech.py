"""How every process of a job speaks: whole lines, so that readers of the log can match on them."""

import errno
import sys

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What writing says where a disk, or somebody's share of it, is full."""


class _Mouth:
    """This process's stdout. Where that is a file whose disk is full, a line is lost, and not the process."""

    def __init__(self) -> None:
        self._is_torn = False
        """The last line may have found room for its beginning alone."""

    def say(self, line: str) -> None:
        start = "\n" if self._is_torn else ""
        try:
            sys.stdout.write(f"{start}{line}\n")
            sys.stdout.flush()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._is_torn = True
        else:
            self._is_torn = False


_mouth = _Mouth()


def say(line: str) -> None:
    """One line on stdout, in a single write: print() makes two on an unbuffered stdout, and ranks share one pipe."""
    _mouth.say(line)
