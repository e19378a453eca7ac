"""Every sensible layout of a job on given machines: none that the trainer would refuse.

Degrees are powers of two; tensor parallelism stays inside a host, where its links are. Layouts come with the least
splitting of the model first.
"""

from collections.abc import Iterator

from pydantic import ValidationError

from trainyard.errors import InputError
from trainyard.planner.facts import facts_of
from trainyard.planner.reading import Machines, check_shape
from trainyard.planner.shapes import ModelShape
from trainyard.spec.job import JobSpec, ParallelismSpec, ZeroSpec
from trainyard.spec.obstacles import FP8_MULTIPLE, layout_obstacles, separates_documents
from trainyard.spec.support import TENSOR_FAMILIES

LEAST_CONTEXT_TOKENS = 2048
"""Tokens of a sequence that a rank keeps under context parallelism: less leaves it nothing to compute."""

MOST_PIPELINE = 32


class Rules:
    """What the trainer accepts of layouts for one job: the same functions that it asks itself.

    `shape`: None for tasks with images, which have data parallelism alone, and no recomputation.
    """

    def __init__(self, job: JobSpec, shape: ModelShape | None) -> None:
        self._job, self._shape, self._model = job, shape, facts_of(job, shape)
        self._fields = {name: getattr(job, name) for name in JobSpec.model_fields}

    def accepts(self, layout: ParallelismSpec) -> bool:
        """Whether the trainer runs the layout at all, with some batch."""
        shape = self._shape
        if shape is None:
            # Classifiers are small: no formula knows what sharding one saves.
            may_shard = self._job.task != "image_classification" or layout.data_shard == 1
            return layout.engine == "torch" and may_shard and self._is_valid(layout)
        if self.obstacle(layout) is not None:
            return False
        try:
            check_shape(layout, shape)
        except InputError:
            return False
        return self._is_proposed(layout, shape) and self._is_valid(layout)

    def obstacle(self, layout: ParallelismSpec) -> str | None:
        """What keeps the trainer from the layout with every batch; None: nothing, as far as its words go."""
        # The least that 8-bit products take; flash_attention_3 keeps documents apart in one sequence alone.
        one = self._job.model.attention == "flash_attention_3" and separates_documents(self._job)
        size = FP8_MULTIPLE if self._job.training.precision == "fp8" and not one else 1
        return self.batch_obstacle(layout, micro_batch=size, num_micro_batches=layout.pipeline, recompute="none")

    def _is_proposed(self, layout: ParallelismSpec, shape: ModelShape) -> bool:
        """Whether it is a layout to propose: what the parity suite holds, in even parts."""
        if self._model.model_type is None and (split_of(layout) > 1 or layout.expert > 1):
            return False  # of a family that isn't known nothing is verified
        if layout.tensor > 1:
            # Experts are divided whole; that they could be cut too keeps the parts of odd ones out.
            widths = (shape.moe_ffn, shape.shared_ffn)
            if self._model.model_type not in TENSOR_FAMILIES or any(width % layout.tensor for width in widths):
                return False
        if layout.expert > 1 or (layout.tensor > 1 and shape.experts):
            # The ranks that hold a copy of an expert split its weights further.
            return shape.hidden % (layout.data_shard * layout.context // layout.expert) == 0
        return True

    def accepts_batch(
        self, layout: ParallelismSpec, *, micro_batch: int, num_micro_batches: int, recompute: str
    ) -> bool:
        """Whether an accepted layout takes these micro-batches and this recomputation."""
        if self._shape is None:
            return recompute == "none"
        found = self.batch_obstacle(
            layout, micro_batch=micro_batch, num_micro_batches=num_micro_batches, recompute=recompute
        )
        return found is None

    def batch_obstacle(
        self, layout: ParallelismSpec, *, micro_batch: int, num_micro_batches: int, recompute: str
    ) -> str | None:
        """What the trainer says against them."""
        found = layout_obstacles(
            self._job,
            layout,
            self._model,
            micro_batch_size=micro_batch,
            num_micro_batches=num_micro_batches,
            recompute=recompute,
        )
        return next(found, None)

    def _is_valid(self, layout: ParallelismSpec) -> bool:
        """What the job's own validators say of 8-bit products, compiled blocks, and so on."""
        try:
            JobSpec(**{**self._fields, "parallelism": layout})
        except ValidationError:
            return False
        return True


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    return [1 << exponent for exponent in range(limit.bit_length())]


def layouts(job: JobSpec, machines: Machines, shape: ModelShape | None, rules: Rules) -> list[ParallelismSpec]:
    """The layouts of all ranks, the model split least first."""
    found = [item for item in _candidates(job, machines, shape) if rules.accepts(item)]
    batch = job.global_batch_size
    return sorted((item for item in found if batch % item.data_parallel_size == 0), key=split_of)


def _candidates(job: JobSpec, machines: Machines, shape: ModelShape | None) -> Iterator[ParallelismSpec]:
    yield from _torch_layouts(job, machines, shape) if shape is not None else _unsplit_layouts(machines)
    yield from _deepspeed_layouts(machines)


def obstacle_of_all(job: JobSpec, machines: Machines, shape: ModelShape | None, rules: Rules) -> str | None:
    """What keeps the trainer from every layout of these machines, said of the one that splits the model least.

    None: it takes some, and the batch divides into none of them.
    """
    if shape is None:
        return None
    found = sorted(_candidates(job, machines, shape), key=split_of)
    accepted = [item for item in found if rules.accepts(item)]
    if not accepted:
        return next((words for item in found if (words := rules.obstacle(item)) is not None), None)
    training = job.training
    size = 1 if training.micro_batch_size == "auto" else training.micro_batch_size
    recompute = "none" if training.activation_checkpointing == "auto" else training.activation_checkpointing
    starved = False
    for item in accepted:
        count, rest = divmod(job.global_batch_size, item.data_parallel_size * size)
        if not rest and count < item.pipeline:
            starved = True
            continue
        words = rules.batch_obstacle(item, micro_batch=size, num_micro_batches=count, recompute=recompute)
        if not rest and words is not None:
            return words
    if starved:
        return (
            f"training.global_batch_size {job.global_batch_size}: divides only into layouts whose pipelines have more "
            "stages than it has micro-batches; raise it"
        )
    return None


def split_of(layout: ParallelismSpec) -> int:
    """Ranks that work on one sequence."""
    return layout.tensor * layout.pipeline * layout.context


def complexity_of(layout: ParallelismSpec) -> tuple[int, int, bool]:
    """By which of two layouts the simpler one is told: how many kinds of splitting it has, over how many ranks, and
    whether a further library does it."""
    degrees = (layout.tensor, layout.pipeline, layout.context, layout.expert)
    kinds = sum(degree > 1 for degree in degrees)
    kinds += layout.pipeline > 1 and layout.pipeline_schedule != "1f1b"
    kinds += layout.data_shard > 1 and layout.data_replicate > 1
    return kinds, split_of(layout) * layout.expert, layout.engine != "torch"


def offloading_layouts(job: JobSpec, machines: Machines, rules: Rules) -> list[ParallelismSpec]:
    """DeepSpeed with its optimizer, and its weights too, in the host's memory: for what fits in no other way."""
    world = machines.world_size
    found = [
        ParallelismSpec(engine="deepspeed", data_replicate=world, zero_stage=2, offload="cpu"),
        ParallelismSpec(engine="deepspeed", data_replicate=world, zero_stage=3, offload="cpu"),
        ParallelismSpec(
            engine="deepspeed",
            data_replicate=world,
            zero_stage=3,
            offload="cpu",
            zero=ZeroSpec(offload_parameters="cpu"),
        ),
    ]
    return [item for item in found if rules.accepts(item) and job.global_batch_size % world == 0]


def _deepspeed_layouts(machines: Machines) -> Iterator[ParallelismSpec]:
    """ZeRO-1 and 2; stage 3 is FSDP under another name."""
    if machines.world_size > 1:
        for stage in (1, 2):
            yield ParallelismSpec(engine="deepspeed", data_replicate=machines.world_size, zero_stage=stage)


def _torch_layouts(job: JobSpec, machines: Machines, shape: ModelShape) -> Iterator[ParallelismSpec]:
    world, per_host = machines.world_size, machines.processes_per_host
    contexts = powers(max(1, job.data.sequence_length // LEAST_CONTEXT_TOKENS))
    for tensor in (size for size in powers(per_host) if per_host % size == 0):
        for context in contexts:
            for pipeline in powers(min(MOST_PIPELINE, shape.layers)):
                data, rest = divmod(world, tensor * context * pipeline)
                if rest or not data:
                    continue
                for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble") if pipeline > 1 else ("1f1b",):
                    for expert in powers(shape.experts or 1):
                        yield from _data_layouts(
                            ParallelismSpec.model_construct(
                                **{
                                    **_DEFAULTS,
                                    "tensor": tensor,
                                    "context": context,
                                    "pipeline": pipeline,
                                    "pipeline_schedule": schedule,
                                    "expert": expert,
                                }
                            ),
                            data,
                            max(1, per_host // (tensor * context)),
                        )


_DEFAULTS = dict(ParallelismSpec())


def _unsplit_layouts(machines: Machines) -> Iterator[ParallelismSpec]:
    """Of models that aren't split."""
    whole = ParallelismSpec.model_construct(**_DEFAULTS)
    return _data_layouts(whole, machines.world_size, machines.processes_per_host)


def _data_layouts(layout: ParallelismSpec, data: int, within_host: int) -> Iterator[ParallelismSpec]:
    """The remaining ranks as copies, as shards within hosts and copies over them, and as shards; least first."""
    for shard in sorted({1, min(data, within_host), data}):
        if data % shard == 0 and shard * layout.context % layout.expert == 0:
            yield layout.model_copy(update={"data_shard": shard, "data_replicate": data // shard})
