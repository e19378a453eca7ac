"""What is hashed while it is written has the hashes of the file that is there, and nothing is read back for them."""

from pathlib import Path

import pytest
import torch
from trainer.checkpoint import blocks
from trainer.checkpoint.blocks import write_blocks
from trainer.checkpoint.group import Group
from trainer.checkpoint.host_copy import HostCopy, SharedPlan
from trainer.checkpoint.manifest import shard_file

TENSORS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "columns": torch.randn(300, 40).t(),
    "half": torch.randn(700, 300).bfloat16(),
    "large": torch.randn(9, 1 << 20),
    "same": torch.randn(700, 300).bfloat16(),
}


def test_hashes_are_those_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, copy, read_back = SharedPlan(Group(None, 0, 1)), HostCopy(), list[int]()
    original = blocks._hashed
    plan.make(TENSORS, plan.local_items(TENSORS))
    for turn in range(2):  # the second one's buffers are the first one's
        tensors = {name: tensor + turn for name, tensor in TENSORS.items()}
        copy.take(plan.mine, tensors)
        results, written = copy.write(plan.mine, tmp_path / str(turn), durable=True)
        (name,) = written
        path = tmp_path / str(turn) / name
        assert written[name].shard_file(name) == shard_file(path)
        archives = [(int(one.storage_data.offset), int(one.storage_data.length)) for one in results]
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "_hashed", lambda *place: read_back.append(place[2]) or original(*place))
            table = write_blocks(path, archives, written[name].values).read_bytes()
        assert table == write_blocks(path, archives).read_bytes()
    assert read_back == [0, 0], "only what has no values isn't known when it is written"
