"""`trainyard export` and back: equal weights, shards as told, and far less memory than the model has bytes.

The file is also the program whose memory is measured: `python -m test_export_weights CHECKPOINT TO`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trainer.checkpoint import Checkpointer
from trainer.export_weights import export
from trainer.models.build import build_model
from trainer_testing.distributed import TESTS
from trainer_testing.text_job import run_trainer, write_job

from trainyard.cli.app import run
from trainyard.errors import InputError
from trainyard.planner import resolve
from trainyard.spec.job import load_job


def save(folder: Path, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> Path:
    """A committed checkpoint of step 3; its folder."""
    checkpointer = Checkpointer(
        str(folder), rank=0, world_size=1, local_dir=folder / "scratch", keep_last=1, asynchronous=False
    )
    checkpointer.save(3, tensors, extra)
    checkpointer.close()
    assert checkpointer.last_error is None
    return folder / "checkpoints/step-00000003"


def test_an_export_is_the_model_and_a_job_starts_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path / "job", "fsdp", steps=4)
    out = tmp_path / "out"
    run_trainer(2, job, out)
    capsys.readouterr()
    assert run(["export", f"{out}/", "--to", str(tmp_path / "hf"), "--max-shard-gib", "0.001", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["step"] == 4 and not list(tmp_path.glob(".*"))
    again = load_job(job, [f"model.source={tmp_path}/hf", "model.config=null", "parallelism=auto"])
    model = build_model(resolve(again, world_size=1), vocab_size=2)
    expected = {f"model.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    reader = Checkpointer(str(out), rank=0, world_size=1, local_dir=tmp_path / "s", keep_last=9, asynchronous=False)
    info = reader.latest()
    assert info is not None and info.step == 4
    reader.load(info, expected)
    assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in model.state_dict().items())
    # Refused before anything is written over.
    assert run(["export", f"{out}/", "--to", str(tmp_path / "hf")]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


def test_shards_hold_every_tensor_once_with_its_type(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"model.layers.{number}.weight": torch.randn(16, 8, generator=generator).to(dtype)
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    } | {"model.scale": torch.tensor(2.5), "model.mask": torch.tensor([True, False])}
    ignored = {"optim.layers.0.weight.exp_avg": torch.ones(16, 8)}
    folder = save(tmp_path, tensors | ignored, {"model_config": {"model_type": "llama"}})
    written = export(folder, tmp_path / "hf", max_shard_bytes=600)
    assert (written["num_tensors"], len(written["files"])) == (6, 4)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written["num_bytes"]
    assert set(index["weight_map"]) == {name.removeprefix("model.") for name in tensors}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(name), tensors[f"model.{name}"])


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    num_bytes = 48 * (4 << 20)
    tensors = {f"model.layers.{number}.weight": torch.full((1024, 1024), float(number)) for number in range(48)}
    folder = save(tmp_path, tensors, {"model_config": {"model_type": "llama"}})
    command = [sys.executable, "-m", "test_export_weights", str(folder), str(tmp_path / "hf")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True, timeout=120)
    grown = int(done.stdout.splitlines()[-1])
    assert (tmp_path / "hf/model.safetensors").stat().st_size > num_bytes
    assert 0 < grown < num_bytes / 3, f"{grown >> 20} MiB more memory for a model of {num_bytes >> 20} MiB"


@pytest.mark.parametrize(
    ("extra", "names", "told"),
    [
        ({}, ["model.a"], "holds no model_config"),
        ({"model_config": {"model_type": "llama"}}, ["optim.a"], "holds no weights of a model"),
        ({"model_config": {"model_type": "llama"}}, ["model.q_proj.lora_A.weight"], "holds an adapter"),
        ({"model_config": {"num_local_experts": 4}}, ["model.a"], "experts lie differently"),
    ],
)
def test_what_it_cannot_write_is_one_line(tmp_path: Path, extra: dict[str, Any], names: list[str], told: str) -> None:
    folder = save(tmp_path, {name: torch.ones(3) for name in names}, extra)
    with pytest.raises(InputError, match=told):
        export(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_torn_checkpoint_is_not_exported(tmp_path: Path) -> None:
    folder = save(tmp_path, {"model.a": torch.ones(3)}, {"model_config": {"model_type": "llama"}})
    (folder / "COMMITTED").unlink()
    with pytest.raises(InputError, match="is no committed checkpoint"):
        export(folder, tmp_path / "hf")


def memory(name: str) -> int:
    """VmRSS or VmHWM (its peak) of this process, bytes. Not ru_maxrss, which a child inherits from its parent."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of imports
    before = memory("VmRSS")
    export(Path(sys.argv[1]), Path(sys.argv[2]))
    print(memory("VmHWM") - before)
