"""How every process of a job speaks: whole lines, so that readers of the log can match on them."""

import os
import select
import sys
from typing import TextIO

from trainyard.kept_room import FULL


class _Mouth:
    """This process's stdout. Where that is a file whose disk is full, a line is lost, and not the process."""

    def __init__(self) -> None:
        self._is_torn = False
        """The last line may have found room for its beginning alone."""

    def say(self, line: str) -> None:
        start = "\n" if self._is_torn else ""
        try:
            _write(sys.stdout, f"{start}{line}\n")
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._is_torn = True
        else:
            self._is_torn = False


def _write(stream: TextIO, text: str) -> None:
    """All of it, or OSError."""
    # Who speaks may quote what is no text, a file's name in another encoding say; a line is lost for no character.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    content = text.encode(encoding, "backslashreplace")
    if stream is not sys.__stdout__:  # somebody's own, which may be no file
        stream.write(content.decode(encoding))
        stream.flush()
        return
    # Past Python's layers: an unbuffered one says nothing of what a disk that fills up had no room for, and a buffered
    # one keeps a line that was refused, to bring it later.
    stream.flush()
    descriptor, rest = stream.fileno(), memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a full pipe or terminal that somebody at its other end made so
            select.select([], [descriptor], [])


_mouth = _Mouth()


def say(line: str) -> None:
    """One line on stdout, in a single write: print() makes two on an unbuffered stdout, and ranks share one pipe."""
    _mouth.say(line)
