"""The trainer runs with transformers 5.17 and torch 2.11 as well as with the pinned versions.

Verified with torch 2.11.0 and transformers 5.17.0 (which takes huggingface-hub below 2) together in front of the pinned
ones on PYTHONPATH, with what lean_imports leaves out: the whole table of parity with its golden losses, fp8, adapters
(QLoRA under FSDP2 and spread experts too), the families that no table names, dropout under every layout, routers'
biases, exports; and before it products, families, optimizers, losses, compiled blocks, images, checkpoints, dry runs,
collectives and the command itself (tests/trainer, but for full and slow cases), and the GPU benchmark's --tiny. torch
2.11 lacks a kernel: there packed documents take SDPA and a mask on GPUs, and that is said. Again on 2026-11-28: 1,600
tests of tests/trainer (parity, adapters, experts, strategies, products, recomputation, families, resumes, the memory's
agreement) and 16 seeds of the parity campaign. What fails with 5.17 and is left: four kin of BERT (big_bird, rembert,
megatron-bert, roformer) see later tokens there unless their configuration says is_decoder, and a recomputed ernie4_5 in
float64.
What stood in the way were parts that differ between versions of transformers, which this holds out, and the places that
say so where they are met (`strategies/mesh.py`, `pipeline.py`, `tensor_parallel.py`, `models/attention.py` and
`build.py`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from trainer.models.build import outline_model, transformer_blocks
from trainer.strategies import fsdp
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from transformers import PreTrainedModel

TRAINER = Path(__file__).resolve().parents[2] / "training_container" / "trainer"
UNSTABLE = ("transformers.distributed", "transformers.integrations", "transformers.generation")
"""5.17's transformers.distributed has no EmbeddingParallel, 5.23's no MoEParamShard."""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_is_imported_that_differs_between_versions_of_transformers() -> None:
    found = {
        f"{path.relative_to(TRAINER)}: {module}"
        for path in TRAINER.rglob("*.py")
        for module in imported_modules(path)
        if module.startswith(UNSTABLE)
    }
    assert not found


def test_recomputation_is_asked_for_by_the_name_that_the_library_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.17's models have no activation_checkpointing_enable, and 5.23 warns of the name that they have."""
    job = tiny_job("single", 1, activation_checkpointing="full")
    older = getattr(PreTrainedModel, "_activation_checkpointing_enable", None)  # in 5.17 there is nothing to take away
    for is_old in (False, True) if older is not None else (True,):
        if is_old and older is not None:
            monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable")
            monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", older)
        model = outline_model(job, vocab_size=VOCAB_SIZE)
        assert all(block.gradient_checkpointing for block in transformer_blocks(model)), is_old


def test_shards_of_integers_are_made_where_torch_wants_gradients_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.11 does: QLoRA under FSDP2 ended in a RuntimeError there."""
    codes = torch.zeros(4, dtype=torch.uint8)
    made: list[torch.nn.Parameter] = []

    def shards_as_before(module: torch.nn.Module, **_: object) -> None:
        made.append(_fsdp_param.nn.Parameter(codes).requires_grad_(False))
        assert isinstance(_fsdp_param.nn.Linear(1, 1), torch.nn.Module)

    monkeypatch.setattr(fsdp, "fully_shard", shards_as_before)
    with pytest.raises(RuntimeError, match="floating point"):
        shards_as_before(torch.nn.Module())
    fsdp.shard(torch.nn.Module())
    assert len(made) == 1 and not made[0].requires_grad
    assert _fsdp_param.nn is torch.nn


def test_integers_are_gathered_as_they_are_where_torch_casts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.11 does: QLoRA in bf16 under FSDP2 read its codes from bf16 there."""

    def types_as_before(parameter: _fsdp_param.FSDPParam, policy: MixedPrecisionPolicy) -> None:
        parameter.orig_dtype, parameter.param_dtype = parameter.sharded_param.dtype, policy.param_dtype

    monkeypatch.setattr(fsdp, "_types_by_torch", types_as_before)
    monkeypatch.setattr(fsdp, "fully_shard", lambda *_, **__: None)
    fsdp.shard(torch.nn.Module())
    for dtype, gathered in ((torch.uint8, None), (torch.int32, None), (torch.float32, torch.bfloat16)):
        parameter = object.__new__(_fsdp_param.FSDPParam)
        parameter.sharded_param = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        parameter.init_dtype_attrs(fsdp.precision_policy("bf16"))
        assert parameter.param_dtype is gathered, dtype
