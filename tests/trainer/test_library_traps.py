"""What is wrong, loud or missing in the libraries today, and where the trainer meets it.

Each test shows the trap itself, without the trainer. One that fails after an upgrade says that upstream has mended it:
then what the test names can go, and the test with it. One is shown with the trainer, by test_compile.py: a recomputed
graph with tensor parallelism.
"""

import inspect
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of 2 whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_transformers_sums_a_replicated_norms_gradient_once_more_for_every_micro_batch(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Met by strategies/tensor_parallel.py, which has styles of its own."""
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def two_equal_ranks(tensor: torch.Tensor, **_: Any) -> None:
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", two_equal_ranks)
    norm = nn.RMSNorm(4)
    ReplicatedWithGradAllReduce().install_forward(norm, mesh)
    values = torch.tensor([1.0, -2.0, 3.0, 4.0])
    norm(values).sum().backward()
    assert norm.weight.grad is not None
    of_one_micro_batch = norm.weight.grad.clone()
    norm(values).sum().backward()
    # Right would be twice as much.
    torch.testing.assert_close(norm.weight.grad, 3 * of_one_micro_batch)


def test_torch_clips_no_gradients_of_different_meshes(mesh: DeviceMesh) -> None:
    """Met by `global_grad_norm` of optimizers/build.py."""
    other = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("one", "other"))
    parameters = []
    for place in (mesh, other["one"]):
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), place, [Replicate()], src_data_rank=None))
        parameter.grad = distribute_tensor(torch.ones(4), place, [Replicate()], src_data_rank=None)
        parameters.append(parameter)
    with pytest.raises(RuntimeError, match="mesh"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def test_torchs_optimizers_take_no_mixture_of_plain_and_distributed_tensors(mesh: DeviceMesh) -> None:
    """Met by `local_tensor` of optimizers/build.py: every optimizer sees the local parts."""
    plain = nn.Parameter(torch.ones(4))
    spread = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None))
    for parameter in (plain, spread):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="mixed"):
        torch.optim.AdamW([plain, spread], foreach=True).step()


def test_gloo_has_no_scaled_sum() -> None:
    """Met by strategies/fsdp.py: FSDP2 sums plainly. NCCL's is wrong in bf16 (pytorch#190747), as GPUs alone show."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)premul"):
            dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))
    finally:
        dist.destroy_process_group()


def test_fsdp_warns_of_any_view(mesh: DeviceMesh) -> None:
    """Met by strategies/parallel.py, which silences it: nobody writes into the views of tensor parallelism."""

    class Flat(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values).view(-1)

    module = fully_shard(Flat(4, 4), mesh=mesh)
    with pytest.warns(UserWarning, match="FSDP2-wrapped module .* returned a view tensor"):
        module(torch.ones(2, 4))


def test_torch_detaches_no_view_in_place() -> None:
    """Met by `Stage.forward` of strategies/pipeline.py: torch's schedules detach what was sent, so no view is sent."""
    values = (torch.ones(4, requires_grad=True) * 2).view(2, 2)
    with pytest.raises(RuntimeError, match="detach views in-place"):
        values.detach_()


def test_torch_multiplies_no_groups_of_float64() -> None:
    """Met by models/build.py: in fp64 the experts are computed one by one."""
    tokens, weights = torch.ones(16, 16, dtype=torch.float64), torch.ones(1, 16, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        torch._grouped_mm(tokens, weights, offs=torch.tensor([16], dtype=torch.int32))


def test_transformers_has_no_pipeline_plan_for_gpt2() -> None:
    """Met by `_outline_of` of strategies/pipeline.py."""
    assert getattr(GPT2Config(), "base_model_pp_plan", None) is None


def test_transformers_sees_packed_documents_in_micro_batches_of_one_alone() -> None:
    """Met by models/attention.py: FlashAttention-3 with packed documents asks for a micro-batch of one."""
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert _is_packed_sequence(positions, batch_size=1)
    assert not _is_packed_sequence(positions.expand(2, -1), batch_size=2)


def test_deepspeed_compiles_a_collective_at_start_up_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Met by `_initialize` of strategies/zero.py; few machines have g++ and ninja."""
    import deepspeed
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    loaded: list[str] = []
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda builder: loaded.append(builder.NAME))
    for is_compatible, expected in ((False, []), (True, ["deepspeed_shm_comm"])):
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", is_compatible)
        build_shm_op()
        assert loaded == expected


_IMPORTS = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from trainer.strategies.deepspeed_import import load_deepspeed
load_deepspeed()
print("mlflow" in sys.modules)
importlib.reload(sys.modules["deepspeed.autotuning.autotuner"])
print("mlflow" in sys.modules)
"""


def test_deepspeed_imports_mlflow_for_an_autotuner_that_nothing_uses(tmp_path: Path) -> None:
    """Met by strategies/deepspeed_import.py: with the real one, seconds of processor on every rank."""
    (tmp_path / "mlflow.py").touch()
    done = subprocess.run([sys.executable, "-c", _IMPORTS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["False", "True"], done.stdout


def test_deepspeed_calls_collectives_that_torch_has_renamed() -> None:
    """Met by `_initialize` of strategies/zero.py, which silences thousands of warnings."""
    from deepspeed.comm.torch import TorchBackend

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        function = TorchBackend.get_all_gather_function()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(torch.empty(2), torch.ones(2))
    finally:
        dist.destroy_process_group()
    renamed = [str(one.message) for one in caught if issubclass(one.category, FutureWarning)]
    # Older ones of torch (2.11 is supported) don't warn yet.
    assert renamed or torch.__version__ < "2.13"


def test_importing_torchao_tells_of_kernels_for_other_machines_and_of_its_own_calls() -> None:
    """Met by `trainer/__init__.py`, which leaves both out of the log."""
    loud = "import logging; logging.basicConfig(); import torchao.quantization"
    done = subprocess.run([sys.executable, "-c", loud], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Calling register_constant() on Enum subclasses is deprecated" in done.stderr
    assert "WARNING:torchao" in done.stderr


def test_ddp_warns_of_the_name_that_older_ones_know(mesh: DeviceMesh) -> None:
    """Met by strategies/ddp.py, which takes the name that this torch has: with 2.11 gone, there is one."""
    names = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" not in names:
        pytest.skip("this torch knows the older name alone")
    assert mesh.size() == 2
    with pytest.warns((FutureWarning, DeprecationWarning, UserWarning), match="broadcast_buffers"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
