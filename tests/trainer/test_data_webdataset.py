"""WebDataset shards: every sample at random, one global order, a cached index, broken shards in one line."""

import errno
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from trainer.data import webdataset
from trainer.data.files import LocalFile
from trainer.data.webdataset import ShardIndex

from trainyard.errors import InputError
from trainyard.spec.job import DataSource


def write_shard(path: Path, members: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> None:
    """A tar of these members, in this order."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def shards(folder: Path) -> DataSource:
    """Two shards of three samples each, in two dialects of tar, with what isn't a sample between."""
    folder.mkdir(exist_ok=True)
    long = "class/" + "n" * 150  # longer than a plain header's name field
    for shard, tar_format in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        members = []
        for number in range(3):
            key = f"{long}{shard}/img{number}"
            members += [(f"{key}.JPG", bytes([shard, number]) * 1000), (f"{key}.cls", str(number).encode())]
            members += [(f"{key}.seg.png", b"")] if number == 1 else []
        write_shard(folder / f"train-{shard:05d}.tar", [("__note__", b"x"), ("README", b"y"), *members], tar_format)
    return DataSource(path=str(folder), format="webdataset")


def test_every_sample_is_there_in_the_order_of_the_shards(tmp_path: Path) -> None:
    index = ShardIndex.open(shards(tmp_path / "data"), tmp_path / "cache")
    assert len(index) == 6
    assert index.extensions == ["jpg", "cls", "seg.png"]
    for number in (5, 0, 3, 4, 1, 2):  # at random
        sample = index.read_sample(number)
        assert sample["jpg"] == bytes([number // 3, number % 3]) * 1000
        assert sample["cls"] == str(number % 3).encode()
        assert ("seg.png" in sample) == (number % 3 == 1)
        assert index.key(number).endswith(f"{number // 3}/img{number % 3}")
    assert index.place(3).startswith(str(tmp_path / "data" / "train-00001.tar") + ": class/")
    with pytest.raises(IndexError):
        index.read_sample(6)


def test_the_index_is_made_once_and_again_when_a_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shards(tmp_path / "data")
    first = ShardIndex.open(source, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(webdataset, "_build", lambda *_: pytest.fail("built again"))
        assert ShardIndex.open(source, tmp_path / "cache").digest == first.digest
    write_shard(tmp_path / "data" / "train-00001.tar", [("a.jpg", b"1")])
    changed = ShardIndex.open(source, tmp_path / "cache")
    assert len(changed) == 4 and changed.digest != first.digest
    with pytest.raises(InputError, match="changed since it was indexed"):
        first.read_sample(5)


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "_MAX_OPEN_SHARDS", 2)
    for shard in range(5):
        write_shard(tmp_path / f"{shard}.tar", [(f"{shard}.bin", bytes([shard]))])
    index = ShardIndex.open(DataSource(path=str(tmp_path), format="webdataset"), tmp_path / "cache")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        assert [index.read_sample(number)["bin"] for number in range(5)] == [bytes([number]) for number in range(5)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2
    index.close()
    assert index.read_sample(4) == {"bin": b"\x04"}


def test_a_broken_shard_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole.tar"
    write_shard(whole, [("a.jpg", b"x" * 5000), ("b.jpg", b"y" * 5000)])
    cases = {
        "cut.tar": (whole.read_bytes()[:9000], "is cut off inside b.jpg"),
        # b.jpg's header is the block at 5632, the end of the tar that at 11264.
        **{
            f"cut{end}.tar": (
                whole.read_bytes()[:end],
                f"at byte {start} of {end}: it is cut off or damaged there: copy",
            )
            for start, end in ((5632, 5900), (11264, 11300))
        },
        **{
            f"open{end}.tar": (
                whole.read_bytes()[:end],
                f"no end of a tar at byte {end}, .* writer left out the end: copy it again, or append 1024 zero bytes",
            )
            for end in (5632, 11264)
        },
        "damaged.tar": (whole.read_bytes().replace(b"b.jpg", b"c.jpg"), "at byte 5632 of .* or damaged there"),
        "text.tar": (b"no tar at all" * 100, "is not a plain tar file"),
        "none.tar": (b"\0" * 10240, "holds no sample"),
    }
    write_shard(tmp_path / "twice.tar", [("a.jpg", b"x"), ("a.JPG", b"y")])
    cases["twice.tar"] = ((tmp_path / "twice.tar").read_bytes(), "has two members .jpg")
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            ShardIndex.open(DataSource(path=str(tmp_path / name), format="webdataset"), tmp_path / "cache")
        assert "\n" not in str(caught.value) and name in str(caught.value)
    write_shard(tmp_path / "many.tar", [(f"img.{number}.jpg", b"x") for number in range(4)])
    with monkeypatch.context() as patched:
        patched.setattr(webdataset, "_MOST_EXTENSIONS", 3)
        with pytest.raises(InputError, match=r"many.tar: img: has .3.jpg, and 3 other extensions come before"):
            ShardIndex.open(DataSource(path=str(tmp_path / "many.tar"), format="webdataset"), tmp_path / "cache")
    with monkeypatch.context() as patched:

        def refused(file: LocalFile) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        patched.setattr(LocalFile, "open", refused)
        with pytest.raises(InputError, match=r"many.tar: can't be read: Input/output error$"):
            ShardIndex.open(DataSource(path=str(tmp_path / "many.tar"), format="webdataset"), tmp_path / "cache")
    with pytest.raises(InputError, match="no file that ends in"):
        (tmp_path / "empty").mkdir()
        ShardIndex.open(DataSource(path=str(tmp_path / "empty"), format="webdataset"), tmp_path / "cache")


def test_a_tar_without_its_end_is_read_once_that_is_appended(tmp_path: Path) -> None:
    """As the refusal advises."""
    write_shard(tmp_path / "a.tar", [("a.jpg", b"x" * 5000), ("b.jpg", b"y" * 5000)])
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:11264])
    source = DataSource(path=str(tmp_path / "a.tar"), format="webdataset")
    with pytest.raises(InputError, match="append 1024 zero bytes"):
        ShardIndex.open(source, tmp_path / "cache")
    with (tmp_path / "a.tar").open("ab") as file:
        file.write(bytes(1024))
    assert ShardIndex.open(source, tmp_path / "cache").read_sample(1) == {"jpg": b"y" * 5000}


def test_labels_of_any_kind_come_as_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [("0.json", json.dumps({"label": 3}).encode()), ("0.png", b"p")])
    index = ShardIndex.open(DataSource(path=str(tmp_path / "a.tar"), format="webdataset"), tmp_path / "cache")
    assert json.loads(index.read_sample(0)["json"]) == {"label": 3}
