"""One rank as the trainer builds it, over a process group that talks to nobody and with tensors that have no values."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp
from transformers import PreTrainedModel

from trainer.data.tokenizer import tokenizer_of
from trainer.dry_run.watch import Answers
from trainer.models.attention import masks_documents
from trainer.models.build import outline_model
from trainer.models.configuration import configuration_in, configuration_of
from trainer.models.quantized import PARTS
from trainer.runtime import Runtime
from trainer.strategies import Strategy, build_strategy, torch_engine
from trainer.strategies.fsdp import COMPUTE_TYPES
from trainer.strategies.torch_engine import TorchStrategy
from trainer.tasks import task_of
from trainyard.errors import InputError
from trainyard.spec.data_files import tokenizer_file_of
from trainyard.spec.job import ResolvedJob
from trainyard.spec.obstacles import separates_documents


class NoValues(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch
    """The mode whose tensors have no values. A copy of a module is of the same one: a tied head on a pipeline's last
    stage, copied in a mode of its own, was there a second time when it was gathered."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, _: Any) -> "NoValues":
        return self


_LAYOUTS_WITH_MESH = ("data_shard", "tensor", "pipeline", "context", "expert")


@contextmanager
def alone_as(rank: int, world_size: int, processes_per_host: int) -> Iterator[Runtime]:
    """This process as one rank of many, of which the others don't exist: messages are sent to nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield Runtime(
            rank=rank,
            world_size=world_size,
            local_rank=rank % processes_per_host,
            device=torch.device("cpu"),
            control_group=group,
        )
    finally:
        dist.destroy_process_group()
        # torch remembers how tensors travel between placements by meshes that are equal, but whose groups are gone.
        _redistribute._gen_transform_infos.cache_clear()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch


def with_configuration(job: ResolvedJob, stated: dict[str, Any] | None) -> ResolvedJob:
    """The job with its model's configuration in place of a source, whose weights nobody reads here.

    `stated`: what is known of a source that is not on this machine; a local folder's config.json comes first.
    """
    model = job.spec.model
    if model.source is None:
        return job
    try:
        config = configuration_in(model.source).to_dict()
    except InputError:
        if stated is None:
            raise
        config = stated
    told = {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}
    # Not validated anew: an adapter goes with a source alone, of which this is the outline.
    return _with_spec(job, model=model.model_copy(update={"source": None, "config": told}))


def shortened(job: ResolvedJob, num_micro_batches: int) -> ResolvedJob:
    """The job with fewer micro-batches a step, as this machine can run it: its blocks not compiled, as compiled code
    can't be looked into, and attention by torch's own function in place of a GPU's kernel, which keeps as much."""
    batch = num_micro_batches * job.micro_batch_size * job.parallelism.data_parallel_size
    training = job.spec.training.model_copy(update={"global_batch_size": batch, "compile": False})
    model = job.spec.model
    if model.attention in ("varlen", "flash_attention_3") and job.parallelism.context == 1:  # refused with more
        model = model.model_copy(update={"attention": "auto"})
    data = job.spec.data
    if _keeps_documents_apart_by_offsets(job):
        # A window wider than the sequence: the kernel takes both without a mask.
        assert model.config is not None
        wide = {"sliding_window": data.sequence_length + 1} if _window_of(job) else {}
        text = model.config.get("text_config")
        config = model.config | ({"text_config": text | wide} if isinstance(text, dict) else wide)
        model = model.model_copy(update={"config": config})
        data = data.model_copy(update={"document_masks": False})
    recovery = job.spec.recovery.model_copy(update={"elastic": None})  # it would adapt this batch once more
    return _with_spec(job, training=training, model=model, data=data, recovery=recovery).model_copy(
        update={"gradient_accumulation_steps": num_micro_batches}
    )


def _keeps_documents_apart_by_offsets(job: ResolvedJob) -> bool:
    """Whether a GPU's kernel does (`models/attention.py`), which reads no mask: no other machine has it."""
    model = job.spec.model
    if not separates_documents(job.spec) or job.parallelism.context > 1 or model.attention in ("eager", "sdpa"):
        return False
    config = configuration_of(job)
    return model.config is not None and config is not None and not masks_documents(job, config)


def _window_of(job: ResolvedJob) -> int | None:
    window = getattr(configuration_of(job), "sliding_window", None)
    return int(window) if window else None


def _with_spec(job: ResolvedJob, **changes: Any) -> ResolvedJob:
    return job.model_copy(update={"spec": job.spec.model_copy(update=changes)})


@dataclass(frozen=True)
class Rank:
    """One rank of a job."""

    strategy: TorchStrategy
    model: PreTrainedModel
    """What the engine was made of."""
    num_params: int
    """Of the whole model, before it was cut; four-bit weights count as what they hold."""
    num_trained: int


def build(job: ResolvedJob, runtime: Runtime, mode: FakeTensorMode) -> Rank:
    """The rank's engine and model."""
    model = _model_of(job)
    _take_values(model, mode)
    params = [(_num_elements(name, weight), weight.requires_grad) for name, weight in model.named_parameters()]
    strategy: Strategy
    with _quiet(), _without_values(), Answers():
        if job.parallelism.engine == "deepspeed":
            with mode:
                strategy = _TorchPart(job=job, model=model, runtime=runtime)
        elif any(getattr(job.parallelism, degree) > 1 for degree in _LAYOUTS_WITH_MESH):
            # A mesh of ranks is a tensor that is read: it needs values. Of weights without any no others are made.
            strategy = build_strategy(job, model=model, runtime=runtime)
        else:
            with mode, Answers():
                strategy = build_strategy(job, model=model, runtime=runtime)
    assert isinstance(strategy, TorchStrategy)
    return Rank(
        strategy, model, sum(size for size, _ in params), sum(size for size, is_trained in params if is_trained)
    )


def _num_elements(name: str, weight: nn.Parameter) -> int:
    """Weights that a parameter holds: two a byte of a four-bit matrix, whose scales are none."""
    part = name.rpartition(".")[2]
    if weight.requires_grad or part not in PARTS:
        return weight.numel()
    return 2 * weight.numel() if part == "codes" else 0


class _TorchPart(TorchStrategy):
    """Of an engine that cuts its memory by itself: the model in the type that it computes in, on one rank, uncut.

    DeepSpeed's stage 0 has autocast in bf16, over float32 weights (`strategies/deepspeed_settings.py`)."""

    name = "the model alone"

    @property
    def _is_autocast(self) -> bool:
        return self._job.parallelism.zero_stage == 0 and self._job.spec.training.precision == "bf16"

    def _place(self, model: nn.Module) -> nn.Module:
        dtype = COMPUTE_TYPES.get(self._job.spec.training.precision, torch.float32)
        for parameter in () if self._is_autocast else model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self._is_autocast else nullcontext()


def _model_of(job: ResolvedJob) -> PreTrainedModel:
    if job.spec.task != "causal_lm":
        return task_of(job).build_model(job, None)
    if job.spec.model.config is None and tokenizer_file_of(job.spec) is None:
        return outline_model(job, vocab_size=0)  # of ready-made ids, which nobody has counted
    config = job.spec.model.config or {}
    return outline_model(job, vocab_size=config.get("vocab_size") or tokenizer_of(job.spec).vocab_size)


def _take_values(model: nn.Module, mode: FakeTensorMode) -> None:
    """Puts tensors of the same shapes and types, which hold no memory, in the place of all parameters."""
    twins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in twins:
                with mode:
                    values = torch.empty(weight.shape, dtype=weight.dtype)
                    twins[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
            module._parameters[name] = twins[id(weight)]


@contextmanager
def _without_values() -> Iterator[None]:
    """Inside, weights are not filled, and DDP doesn't ask other ranks for the shapes and values of theirs."""
    with (
        mock.patch.object(torch_engine, "fill", lambda model, **_: model),
        mock.patch.object(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None),
        mock.patch.object(ddp, "_sync_module_states", lambda *_, **__: None),
        mock.patch.object(DistributedDataParallel, "__init__", _construct_with_hook),
    ):
        yield


_construct = DistributedDataParallel.__init__


def _construct_with_hook(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """DDP asks a message for its result, which one to nobody has not: a hook hands it the bucket as it is."""
    _construct(module, *args, **kwargs)
    module.register_comm_hook(None, _reduced)
    module.reducer = _SettledReducer(module.reducer)  # type: ignore[assignment]


class _SettledReducer:
    """DDP's reducer, but for asking other ranks in which order its buckets shall be: they stay as they are."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _reduced(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
