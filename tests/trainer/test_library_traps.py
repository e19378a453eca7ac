"""What is wrong, loud or missing in the libraries today, and where the trainer meets it.

Each test shows the trap itself, without the trainer. One that fails after an upgrade says that upstream has mended it:
then what the test names can go, and the test with it. One is shown with the trainer, by test_compile.py: a recomputed
graph with tensor parallelism.
"""

import copy
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from trainer import collective_names, lean_imports
from trainer.models.recomputation import AllButKept, _uncounted
from trainer.strategies.deepspeed_import import load_deepspeed
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

pytestmark = pytest.mark.slow

older_torch_is_silent = pytest.mark.skipif(torch.__version__ < "2.13", reason="2.11, which also runs, doesn't say it")


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


def test_torchao_keeps_the_input_of_a_frozen_layer_for_a_gradient_that_nobody_takes() -> None:
    """Met by models/float8_frozen.py."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(32, 16, dtype=torch.bfloat16).requires_grad_(False))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        model(torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True))
    assert torch.Size((64, 32)) in kept


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


@older_torch_is_silent
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


def test_torch_makes_no_causal_bias_inside_a_dispatch_mode() -> None:
    """Met by `causal_bias` of strategies/context_parallel.py: selective recomputation and dry runs are such modes."""
    with FakeTensorMode(), pytest.raises(RuntimeError, match="not a subclass of the requested type"):
        causal_lower_right(2, 4)


def test_what_draws_and_is_kept_leaves_other_numbers_to_what_is_computed_again() -> None:
    """Met by `_drops` of models/recomputation.py, which keeps no attention that drops."""
    kept = [torch.ops.aten.native_dropout.default]
    numbers = []

    def block(values: torch.Tensor) -> torch.Tensor:
        dropped, _ = torch.native_dropout(values, 0.5, True)
        numbers.append(torch.rand(()))
        return (dropped * values.sin()).exp()

    values = torch.randn(32, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, kept)
    result = checkpoint(block, values, use_reentrant=False, context_fn=contexts)
    assert isinstance(result, torch.Tensor)
    result.sum().backward()
    first, again = numbers
    assert first != again


@pytest.mark.skipif(torch.__version__ < "2.13", reason="2.11, which also runs, counts what is kept alone")
def test_torch_counts_every_operation_of_what_it_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Met by `AllButKept` of models/recomputation.py: FSDP's units inside a block tell a profiler more the second
    time, and ZeRO-3 gathers in other portions."""
    told = []

    def block(values: torch.Tensor) -> torch.Tensor:
        told.append(0)
        gathered = [torch.empty(8).copy_(values.detach()) for _ in told]
        return gathered[0] * values.sin().exp()

    def backward() -> None:
        values = torch.randn(8, requires_grad=True)
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        result = checkpoint(block, values, use_reentrant=False, context_fn=contexts)
        assert isinstance(result, torch.Tensor)
        result.sum().backward()

    with pytest.raises(RuntimeError, match=r"invocation index 1 encountered during backward but not found"):
        backward()
    monkeypatch.setattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", AllButKept())
    backward()


def test_torch_does_not_notice_that_what_it_keeps_is_changed_through_a_products_view() -> None:
    """Met by `Keeping` of models/recomputation.py: the second pass begins with what the first ended with."""

    def block(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ rows).mul_(2.0).sin()

    def gradient(**options: Any) -> torch.Tensor:
        rows = torch.linspace(0.0, 1.0, 8).view(2, 2, 2).requires_grad_()
        result = checkpoint(block, rows, use_reentrant=False, **options)
        assert isinstance(result, torch.Tensor)
        result.sum().backward()
        assert rows.grad is not None
        return rows.grad

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default])
    assert not torch.allclose(gradient(context_fn=contexts), gradient())


def test_torchs_own_list_is_there_again_whatever_ends_a_pass() -> None:
    own = torch.utils.checkpoint.SAC_IGNORED_OPS
    with pytest.raises(ValueError, match="stopped"), _uncounted(nullcontext()):
        assert torch.ops.aten.sin.default in torch.utils.checkpoint.SAC_IGNORED_OPS
        raise ValueError("stopped")
    assert torch.utils.checkpoint.SAC_IGNORED_OPS is own


def test_torch_multiplies_no_groups_of_float64() -> None:
    """Met by models/build.py: in fp64 the experts are computed one by one."""
    tokens, weights = torch.ones(16, 16, dtype=torch.float64), torch.ones(1, 16, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        torch._grouped_mm(tokens, weights, offs=torch.tensor([16], dtype=torch.int32))


def test_torch_leaves_products_of_groups_out_of_autocast() -> None:
    """Met by models/grouped_products.py."""
    rows, groups, ends = torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([2, 4], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(rows, groups[0]).dtype == torch.bfloat16
        assert torch._grouped_mm(rows, groups, offs=ends).dtype == torch.float32


def test_transformers_sees_packed_documents_in_micro_batches_of_one_alone() -> None:
    """Met by models/attention.py: FlashAttention-3 with packed documents asks for a micro-batch of one."""
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert _is_packed_sequence(positions, batch_size=1)
    assert not _is_packed_sequence(positions.expand(2, -1), batch_size=2)


def test_mixtrals_noise_changes_what_a_hook_around_the_backward_pass_lets_nobody_change() -> None:
    """Met by models/routers.py, `copy_noisy_inputs`: DeepSpeed's stage 3 has such hooks on every module."""
    config = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_local_experts=2, num_experts_per_tok=1, router_jitter_noise=0.1
    )
    block = MixtralSparseMoeBlock(config)
    hidden = torch.ones(1, 2, 8, requires_grad=True)
    block(hidden * 1.0)
    block.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        block(hidden * 1.0)


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


_MLFLOW = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from trainer.strategies.deepspeed_import import load_deepspeed
load_deepspeed()
print("mlflow" in sys.modules)
importlib.reload(sys.modules["deepspeed.autotuning.autotuner"])
print("mlflow" in sys.modules)
"""

_INDUCTOR = """
import importlib, sys, torch
from trainer import lean_imports
from trainer.strategies.deepspeed_import import load_deepspeed
load_deepspeed()
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
print("torch._inductor.compile_fx" in sys.modules, compiler.compile() is torch.compile)
sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, lean_imports.LeanFinder)]
importlib.reload(original_muon)
print("torch._inductor.compile_fx" in sys.modules)
"""

_TRANSFORMERS = """
import importlib, sys
from trainer import lean_imports
from transformers import PreTrainedModel
from transformers.loss import loss_for_object_detection, loss_utils
from transformers.quantizers import quantizer_torchao
from transformers.utils import import_utils
def brought():
    print([name in sys.modules for name in ("scipy.optimize", "torchao")])
brought()
reads = import_utils.create_import_structure_from_path
print(reads.cache_info().misses == reads.cache_info().currsize)
assign = loss_for_object_detection.linear_sum_assignment
sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, lean_imports.LeanFinder)]
for module in (loss_for_object_detection, quantizer_torchao, import_utils):
    importlib.reload(module)
brought()
import_utils.define_import_structure(sys.modules["transformers.models"].__file__)
reads = import_utils.create_import_structure_from_path
print(reads.cache_info().misses == reads.cache_info().currsize)
print([list(map(int, one)) for one in assign([[4, 1], [2, 8]])])
"""


def _printed(script: str, *arguments: str) -> list[str]:
    """What a script says on stdout, by a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_deepspeed_imports_mlflow_for_an_autotuner_that_nothing_uses(tmp_path: Path) -> None:
    """Met by strategies/deepspeed_import.py: with the real one, seconds of processor on every rank."""
    (tmp_path / "mlflow.py").touch()
    assert _printed(_MLFLOW, str(tmp_path))[-2:] == ["False", "True"]


def test_deepspeed_imports_the_inductor_to_ask_whether_an_optimizer_is_muon() -> None:
    """Met by lean_imports.py: 1,140 modules, on every rank."""
    assert _printed(_INDUCTOR)[-2:] == ["False True", "True"]


def test_transformers_imports_optimizers_and_quantizers_for_every_model_and_reads_its_folders_twice() -> None:
    """Met by lean_imports.py. What it leaves out is there once it is called."""
    lean, read_once, real, read_again, assigned = _printed(_TRANSFORMERS)[-5:]
    assert (lean, read_once) == ("[False, False]", "True")
    assert (real, read_again) == ("[True, True]", "False")
    assert assigned == "[[0, 1], [1, 0]]"


def test_what_deepspeed_would_compile_at_import_is_compiled_once_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lean_imports.py: nobody who asks for Muon gets another one."""
    compiled: list[object] = []

    def compile_(function: Callable[[int], int]) -> Callable[[int], int]:
        compiled.append(function)
        return lambda value: function(value) + 100

    monkeypatch.setattr(torch, "compile", compile_)
    load_deepspeed()  # without MLflow, which its modules would bring

    def double(value: int) -> int:
        return 2 * value

    with lean_imports.compiled_when_called(ModuleType("muon")):
        from deepspeed.runtime import compiler

        later = compiler.compile()(double)
    assert compiler.compile() is compile_
    assert (compiled, later.__name__) == ([], "double")
    assert [later(1), later(2)] == [102, 104]
    assert compiled == [double]


def test_a_stand_in_gives_way_to_a_body_that_takes_more_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lean_imports.py: another version of a library may take another name, or call one at once."""
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("of_a_library", "of_another_library"):
        (tmp_path / f"{module}.py").write_text("others = 7\ndef later(): return 8\n")
    with lean_imports.on_demand("of_a_library", "later")(ModuleType("body")):
        from of_a_library import later  # type: ignore[import-not-found]

        assert not hasattr(sys.modules["of_a_library"], "__file__"), "not imported for what waits"
        from of_a_library import others
    assert (others, later(), sys.modules["of_a_library"].others) == (7, 8, 7)
    with lean_imports.on_demand("of_another_library", "later")(ModuleType("body")):
        from of_another_library import later as now  # type: ignore[import-not-found]

        assert now() == 8
        with pytest.raises(ImportError):
            from of_another_library import nothing  # noqa: F401
    assert sys.modules["of_another_library"].others == 7


def test_where_a_library_has_another_name_for_it_nothing_is_saved_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of lean_imports.py, whose names are no promises of these libraries."""
    load_deepspeed()
    from deepspeed.runtime import compiler

    bare = ModuleType("import_utils")
    monkeypatch.delattr(compiler, "compile")
    for held in (lean_imports.every_folder_read_once, lean_imports.compiled_when_called):
        with held(bare):
            bare.ran = held  # type: ignore[attr-defined]
        assert bare.ran is held and not hasattr(compiler, "compile")
    loader = SourceFileLoader("trainer", lean_imports.__file__)
    copied = copy.copy(lean_imports._Held(loader, lean_imports.every_folder_read_once))
    assert copied.get_filename("trainer") == lean_imports.__file__, "a copy asks itself for what it doesn't have yet"


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


def test_torch_warns_of_two_collectives_older_names() -> None:
    """Met by collective_names.py, which takes the names that this torch has: with 2.11 gone, there are no others."""
    own, out = torch.ones(2), torch.empty(2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collective_names.all_gather_single(out, own)
            collective_names.reduce_scatter_single(out, own)
        if hasattr(dist, "all_gather_single"):
            for older in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor):
                with pytest.warns(FutureWarning, match="is deprecated"):
                    older(out, own)
    finally:
        dist.destroy_process_group()
    assert torch.equal(out, own)


@older_torch_is_silent
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
