"""A job's data, ready to read: the one composing place of this room."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.data.chat import chat_template_of
from trainer.data.s3_files import PartCache
from trainer.data.shared_units import SharedUnits
from trainer.data.stream import BatchStream, SequenceTable, ValidationStream
from trainer.data.streamed_tokens import are_streamed, open_streamed_tokens
from trainer.data.token_cache import TokenCache, open_token_cache
from trainer.data.token_units import Vocabulary
from trainer.data.tokenizer import tokenizer_of
from trainer.speech import say
from trainyard.errors import InputError
from trainyard.spec.data_files import is_ready_made, sources_by_name, tokenizer_file_of
from trainyard.spec.job import DataSource, DataSpec, ResolvedJob
from trainyard.spec.obstacles import stated_vocabulary


@dataclass(frozen=True)
class ValidationSet:
    """What is validated on together."""

    name: str | None
    """None: the job's own set."""
    stream: ValidationStream
    every_steps: int | None
    """None: training.validation_every_steps."""


@dataclass(frozen=True)
class JobData:
    """What a job reads, whatever its task."""

    train: BatchStream
    validation: ValidationStream | None
    """The sources without a name."""
    named_validation: tuple[ValidationSet, ...] = field(default=(), kw_only=True)

    def describe(self) -> dict[str, Any]:
        """What result.json says of the data."""
        return {}

    @property
    def has_news(self) -> bool:
        """Whether this rank has counted what the others may not know of: then all `gather` after the step."""
        return False

    def gather(self, group: dist.ProcessGroup) -> None:
        """On every rank, and once more at the job's end: brings together what ranks have counted apart."""

    def check_limits(self) -> None:
        """InputError, on every rank alike, where what was gathered is more than may be."""

    def close(self) -> None:
        """Ends the threads that read ahead."""


@dataclass(frozen=True)
class TextData(JobData):
    """What a language job reads."""

    vocab_size: int
    """One more than the largest id that can occur: the model's embedding needs at least as many rows."""
    unigram_entropy_nats: float | None
    """Of the tokenized validation text, else of the training text: a model that has learnt anything is below it. None
    where the tokens are streamed, which nobody has counted."""
    tokenizer_digest: str
    bad_records: dict[str, int] = field(default_factory=dict)
    """Records left out because they are broken, by data set; none where nothing is."""

    def describe(self) -> dict[str, Any]:
        """See JobData."""
        told: dict[str, Any] = {"bad_records": self.bad_records} if self.bad_records else {}
        return {"unigram_entropy_nats": self.unigram_entropy_nats, **told}

    def close(self) -> None:
        """See JobData."""
        self.train.close()


def build_data(job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path) -> TextData:
    """Open the job's data for one data-parallel rank; the first call on a host tokenizes into `cache_dir`.

    Every rank may call it at once (one of a host builds, the others wait). InputError names the file or field.
    """
    spec, sets = job.spec, _TokenSets(job, cache_dir)
    place = {
        "global_batch_size": spec.global_batch_size,
        "micro_batch_size": job.micro_batch_size,
        "data_parallel_rank": data_parallel_rank,
        "data_parallel_size": data_parallel_size,
    }
    sets.check_vocabulary()
    caches = {"train": sets.open(spec.data.train, "train")}
    stream = BatchStream(
        _table(caches["train"], "train", spec.data),
        dataset_digest=caches["train"].digest,
        seed=spec.training.seed,
        shuffle=spec.data.shuffle,
        **place,
    )
    validation: dict[str | None, ValidationSet] = {}
    for name, sources in sources_by_name(spec.data.validation).items():
        field = "validation" if name is None else f"validation ({name})"
        caches[field] = sets.open(sources, field)
        max_steps = sources[0].batches or spec.training.validation_batches
        table, digest = _table(caches[field], field, spec.data), caches[field].digest
        of_name = ValidationStream(table, max_steps=max_steps, dataset_digest=digest, **place)
        validation[name] = ValidationSet(name, of_name, sources[0].every_steps)
    own = validation.pop(None, None)
    return TextData(
        train=stream,
        validation=None if own is None else own.stream,
        named_validation=tuple(validation.values()),
        vocab_size=max(cache.vocab_size for cache in caches.values()),
        unigram_entropy_nats=caches["train" if own is None else "validation"].unigram_entropy_nats,
        tokenizer_digest=sets.tokenizer.digest,
        bad_records=_told(caches),
    )


class _TokenSets:
    """Opens a job's data sets, all with one tokenizer and template."""

    def __init__(self, job: ResolvedJob, cache_dir: Path) -> None:
        self._job = job
        self._cache_dir = cache_dir
        spec = job.spec
        file = tokenizer_file_of(spec)
        self.tokenizer = tokenizer_of(spec)
        self._template = chat_template_of(spec.data.chat_template, file)
        self._vocab_is_open = file is None
        where = spec.checkpoint.destination if spec.data.shared_tokens else None
        self._shared = None if where is None else SharedUnits(where)

    def open(self, sources: Sequence[DataSource], field: str) -> TokenCache:
        """One set's tokens, made now if nobody has; those of training may stay in S3. `field`: of `data`."""
        data = self._job.spec.data
        if field == "train" and are_streamed(sources, streaming=data.streaming):
            vocabulary = Vocabulary(self._known_vocabulary(), is_open=False)
            return open_streamed_tokens(sources, vocabulary, self._cache_dir, cache_bytes=_cache_bytes(self._job))
        return open_token_cache(
            sources,
            self.tokenizer,
            self._cache_dir,
            vocab_is_open=self._vocab_is_open,
            chat_template=self._template,
            max_bad_records=data.max_bad_records,
            where=f"data.{field}",
            streaming=data.streaming,
            shared=self._shared,
        )

    def check_vocabulary(self) -> None:
        """InputError, before anything is tokenized, where the model has fewer rows than the tokenizer has ids."""
        spec = self._job.spec
        if self._vocab_is_open and is_ready_made(spec):
            return  # nobody has counted these ids yet
        if spec.model.source is None and stated_vocabulary(spec) is None:
            return  # the model gets as many rows as that
        from trainer.models.configuration import check_vocabulary, configuration_of  # transformers

        config = configuration_of(self._job)
        if config is not None and isinstance(getattr(config, "vocab_size", None), int):
            check_vocabulary(config, self.tokenizer.vocab_size)

    def _known_vocabulary(self) -> int:
        """Nobody has counted streamed ids: without a tokenizer they are those that the model has a place for."""
        if not self._vocab_is_open:
            return self.tokenizer.vocab_size
        if self._job.spec.model.source is None:
            size = stated_vocabulary(self._job.spec)
            assert size is not None, "refused by spec.obstacles"
            return size
        from trainer.models.configuration import configuration_of  # transformers, which nothing else here needs

        config = configuration_of(self._job)
        if config is None:
            raise InputError(
                f"model.source: {self._job.spec.model.source}: streamed tokens need a vocabulary, and no configuration"
                " can be read there; set data.tokenizer, or correct the path"
            )
        return int(config.vocab_size)


def _table(cache: TokenCache, field: str, data: DataSpec) -> SequenceTable:
    sequences = SequenceTable(
        cache,
        sequence_length=data.sequence_length,
        packing=data.packing,
        separate_documents=data.document_masks,
    )
    if not len(sequences):
        raise InputError(f"data.{field}: has no document of at least 2 tokens, so nothing to predict")
    return sequences


def part_cache(job: ResolvedJob, cache_dir: Path) -> PartCache | None:
    """What reads shards in S3 for one of a rank's data sets; None unless the job streams."""
    if not job.spec.data.streaming:
        return None
    num_sets = 1 + len(sources_by_name(job.spec.data.validation))
    return PartCache(cache_dir, max_bytes=_cache_bytes(job) // num_sets)


def _cache_bytes(job: ResolvedJob) -> int:
    """A rank's share of the disk."""
    return int(job.spec.data.stream_cache_gib * (1 << 30)) // job.processes_per_host


def _told(caches: Mapping[str, TokenCache]) -> dict[str, int]:
    """Bad records by data set; the first few are said on stdout, once."""
    found = {f"data.{field}": cache.num_bad_records for field, cache in caches.items() if cache.num_bad_records}
    if int(os.environ.get("RANK", "0")) == 0:
        for field, cache in caches.items():
            if cache.num_bad_records:
                named = "; ".join(cache.bad_records)
                say(f"data.{field} bad_records={cache.num_bad_records} left out: {named}")
    return found
