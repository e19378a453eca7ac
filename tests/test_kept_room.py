"""Files on a full disk."""

import errno
from pathlib import Path

import pytest

from trainyard.kept_room import write_whole


def test_a_file_is_written_whole_or_stays_and_nothing_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a draft of what didn't fit stayed, and took the room that was to be made."""
    path = tmp_path / "prices.json"
    write_whole(path, "before é")
    assert path.read_text(encoding="utf-8") == "before é"
    write = Path.write_bytes

    def half(self: Path, content: bytes) -> int:
        write(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"and after")
    assert [one.name for one in tmp_path.iterdir()] == ["prices.json"]
    assert path.read_text(encoding="utf-8") == "before é"
