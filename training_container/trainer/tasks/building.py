"""What the tasks with images share: the model's configuration, its weights, their data streams, what they refuse."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from trainer.data import JobData, ValidationSet
from trainer.data.bad_records import BadRecords
from trainer.models import rotary
from trainer.models.configuration import WRONG, configuration_in, one_line, refusing
from trainer.models.deferred_weights import defer, outline, source_of
from trainer.models.gates import thin_gates
from trainer.models.norms import fuse_norms
from trainer.models.sharded_source import load, refusing_source, to_trained_type
from trainer.seeds import seed_everything
from trainer.tasks.samples import SampleStream, SampleTable, SampleValidation
from trainyard.errors import InputError
from trainyard.spec.data_files import sources_by_name
from trainyard.spec.job import DataSource, ImageSpec, ResolvedJob


@dataclass(frozen=True)
class ImageData(JobData):
    """What a job with images reads."""

    tables: tuple[SampleTable, ...]
    _bad_rows: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _left_out: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _named: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _num_told: dict[str, int] = field(default_factory=dict)
    """How many are left out of this rank's batches, of which all know."""

    def describe(self) -> dict[str, Any]:
        """See JobData: samples that were met, by any rank, and left out, by data set; none where nothing was."""
        told = {field: len(rows) for field, rows in self._bad_rows.items() if rows}
        return {"bad_records": told} if told else {}

    @property
    def has_news(self) -> bool:
        """See JobData."""
        return any(len(table.left_out) > self._num_told.get(table.where, 0) for table in self.tables)

    def gather(self, group: dist.ProcessGroup) -> None:
        """See JobData: a sample that several ranks have met is one. Sent is what all don't know yet."""
        mine = {
            table.where: (
                set(table.bad_rows) - self._bad_rows[table.where],
                table.left_out - self._left_out[table.where],
                list(table.bad.named),
            )
            for table in self.tables
        }
        self._num_told.update({table.where: len(table.left_out) for table in self.tables})
        all_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_ranks, mine, group=group)
        for where in mine:
            bad_rows, left_out, named = zip(*(rank[where] for rank in all_ranks), strict=True)
            self._bad_rows[where].update(*bad_rows)
            self._left_out[where].update(*left_out)
            self._named[where] = [*dict.fromkeys(itertools.chain(*named))]

    def check_limits(self) -> None:
        """See JobData."""
        for table in self.tables:
            of_all = BadRecords(table.bad.limit, table.where)
            of_all.extend(len(self._left_out[table.where]), self._named[table.where])

    def close(self) -> None:
        """See JobData."""
        for stream in (self.train, self.validation, *(one.stream for one in self.named_validation)):
            if isinstance(stream, SampleStream | SampleValidation):
                stream.close()


def config_of(job: ResolvedJob, model_types: Sequence[str], **defaults: Any) -> PretrainedConfig:
    """The model's Hugging Face configuration; InputError unless its type is one of `model_types`.

    `defaults`: what a configuration in the job is completed by.
    """
    spec = job.spec.model
    if spec.config is not None:
        settings = defaults | spec.config
        model_type = settings.pop("model_type")
        _check_type(f"model.config.model_type: {model_type}", model_type, job.spec.task, model_types)
        with refusing(spec.config):
            return AutoConfig.for_model(model_type, **settings)
    assert spec.source is not None
    try:
        config = configuration_in(spec.source)
    except InputError:
        raise  # it is a ValueError too, and says already what is wrong where
    except WRONG as error:
        raise InputError(f"model.source: {one_line(error)}") from None
    _check_type(f"model.source: {spec.source} is a {config.model_type}", config.model_type, job.spec.task, model_types)
    return config


def _check_type(what: str, model_type: str, task: str, model_types: Sequence[str]) -> None:
    if model_type not in model_types:
        raise InputError(f"{what}: task {task} is verified for {', '.join(model_types)} alone")


def outlined(
    job: ResolvedJob, auto_class: Any, config: PretrainedConfig, *, new_head: str | None = None, **options: Any
) -> PreTrainedModel:
    """The model of `config`, new or from the job's source, without its weights (`deferred_weights`) or with them.

    `new_head`: weights of the source whose names begin so and don't fit `config` are new ones. `options` go to
    `from_config` and `from_pretrained` alike. `finished` has to follow, once the caller has frozen what is not trained.
    """
    seed, stated, source = job.spec.training.seed, job.spec.model.config, job.spec.model.source
    seed_everything(seed)
    if stated is not None:
        with refusing(stated):
            model = outline(lambda: auto_class.from_config(config, dtype=torch.float32, **options), seed=seed)
    else:
        assert source is not None
        with refusing_source(source):
            model = load(auto_class, source, config, new_head=new_head, **options)
    assert isinstance(model, PreTrainedModel)
    return model


def try_picture(model: PreTrainedModel, size: int, see: Callable[[PreTrainedModel, torch.Tensor], Any]) -> None:
    """InputError where `see(model, picture)` fails for a new model: that its stages don't fit each other, or the
    picture of `size` pixels a side, nothing else tells before the first step. No number is computed."""
    # In one type: what is frozen has the one that the job computes in, and no autocast mends that on the meta device.
    picture = torch.zeros(1, 3, size, size, device="meta")
    if model.config._attn_implementation not in (None, "eager", "sdpa"):
        model.set_attn_implementation("sdpa")  # a GPU's own kernels take no such picture; the sizes are the same
    try:
        see(model.to("meta").float().eval(), picture)
    except (RuntimeError, ValueError, IndexError) as error:
        raise InputError(
            f"model.config: a picture of {size} x {size} pixels can't go through such a {model.config.model_type}"
            f" ({one_line(error)}); make its sizes, those of its stages and images.size fit each other"
        ) from None


def finished(model: PreTrainedModel, job: ResolvedJob) -> PreTrainedModel:
    """`model`, its parameters an outline in the types that they are trained in."""
    fuse_norms(model)
    thin_gates(model)
    rotary.settle(model, job.spec.data.sequence_length)
    if source_of(model) is None:
        defer(model)
    precision = job.spec.training.precision
    to_trained_type(model.parameters(), precision)
    if precision == "fp64":
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.double()
    return model


def image_data(
    job: ResolvedJob,
    make_table: Callable[[Sequence[DataSource], str, bool], SampleTable],
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> ImageData:
    """The streams over the tables that `make_table(sources, field, is_training)` gives, their first samples checked."""
    spec, images = job.spec, job.spec.images or ImageSpec()
    place = {
        "global_batch_size": spec.global_batch_size,
        "micro_batch_size": job.micro_batch_size,
        "data_parallel_rank": data_parallel_rank,
        "data_parallel_size": data_parallel_size,
        "num_threads": images.decode_threads,
    }
    train = make_table(spec.data.train, "data.train", True)
    tables = [train]
    validation: dict[str | None, ValidationSet] = {}
    for name, sources in sources_by_name(spec.data.validation).items():
        table = make_table(sources, "data.validation" + (f" ({name})" if name else ""), False)
        tables.append(table)
        max_steps = sources[0].batches or spec.training.validation_batches
        of_name = SampleValidation(table, max_steps=max_steps, dataset_digest=table.digest, **place)
        validation[name] = ValidationSet(name, of_name, sources[0].every_steps)
    own = validation.pop(None, None)
    for table in tables:
        table.check_first()
    stream = SampleStream(
        train, dataset_digest=train.digest, seed=spec.training.seed, shuffle=spec.data.shuffle, **place
    )
    return ImageData(
        train=stream,
        validation=None if own is None else own.stream,
        named_validation=tuple(validation.values()),
        tables=tuple(tables),
    )
