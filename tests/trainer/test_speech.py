"""What a process says, on a log whose disk fills up, or whose reader is slow."""

import errno
import io
import os
import sys
import threading
from pathlib import Path

import pytest
from trainer import speech


@pytest.mark.parametrize("buffering", [0, -1])
def test_of_a_line_that_found_room_for_its_beginning_alone_the_rest_does_not_come_later(
    buffering: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks run unbuffered: there Python says nothing of bytes that the disk did not take."""
    room, honest = [6 + 3], os.write

    def write(descriptor: int, content: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = honest(descriptor, content[: room[0]])
        room[0] -= taken
        return taken

    path = tmp_path / "log"
    with path.open("wb", buffering=buffering) as file, io.TextIOWrapper(file, "utf-8", write_through=True) as log:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, log)
        monkeypatch.setattr(os, "write", write)
        speech.say("first")
        speech.say("second")
        room[0] = 1000
        speech.say("third")
        speech.say("fourth")
    assert path.read_text() == "first\nsec\nthird\nfourth\n"


def test_a_line_waits_for_a_reader_that_made_its_pipe_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    line = "x" * 200_000  # more than a pipe holds

    def speak() -> None:
        try:
            speech.say(line)
        finally:
            os.close(writer)

    with os.fdopen(reader, "rb") as told, os.fdopen(writer, "w", closefd=False) as log:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, log)
        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        assert told.read().decode() == f"{line}\n"
        speaker.join(timeout=300)
