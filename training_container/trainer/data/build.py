"""A job's data, ready to read: the one composing place of this room."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.chat import chat_template_of
from trainer.data.stream import BatchStream, SequenceTable, ValidationStream
from trainer.data.token_cache import TokenCache, open_token_cache
from trainer.data.tokenizer import tokenizer_file_of, tokenizer_of
from trainyard.errors import InputError
from trainyard.spec.job import DataSource, ResolvedJob


@dataclass(frozen=True)
class JobData:
    """What a job reads, whatever its task."""

    train: BatchStream
    validation: ValidationStream | None

    def describe(self) -> dict[str, Any]:
        """What result.json says of the data."""
        return {}

    def close(self) -> None:
        """Ends the threads that read ahead."""


@dataclass(frozen=True)
class TextData(JobData):
    """What a language job reads."""

    vocab_size: int
    """One more than the largest id that can occur: the model's embedding needs at least as many rows."""
    unigram_entropy_nats: float
    """Of the tokenized validation text, else of the training text: a model that has learnt anything is below it."""
    tokenizer_digest: str

    def describe(self) -> dict[str, Any]:
        """See JobData."""
        return {"unigram_entropy_nats": self.unigram_entropy_nats}


def build_data(job: ResolvedJob, *, data_parallel_rank: int, data_parallel_size: int, cache_dir: Path) -> TextData:
    """Open the job's data for one data-parallel rank; the first call on a host tokenizes into `cache_dir`.

    Every rank may call it at once (one of a host builds, the others wait). InputError names the file or field.
    """
    spec = job.spec
    tokenizer = tokenizer_of(spec)
    template = chat_template_of(spec.data.chat_template, tokenizer_file_of(spec))

    def tokens(sources: Sequence[DataSource], field: str) -> TokenCache:
        for source in sources:
            if source.format == "webdataset":
                raise InputError(
                    f"data path {source.path}: webdataset is for images; a causal_lm job reads text, jsonl, parquet or"
                    " tokens"
                )
        return open_token_cache(
            sources,
            tokenizer,
            cache_dir,
            vocab_is_open=spec.data.tokenizer is None and spec.model.source is None,
            chat_template=template,
            max_bad_records=spec.data.max_bad_records,
            where=f"data.{field}",
        )

    def table(cache: TokenCache, field: str) -> SequenceTable:
        sequences = SequenceTable(
            cache,
            sequence_length=spec.data.sequence_length,
            packing=spec.data.packing,
            separate_documents=spec.data.document_masks,
        )
        if not len(sequences):
            raise InputError(f"data.{field}: has no document of at least 2 tokens, so nothing to predict")
        return sequences

    train = tokens(spec.data.train, "train")
    validation = tokens(spec.data.validation, "validation") if spec.data.validation else None
    stream = BatchStream(
        table(train, "train"),
        dataset_digest=train.digest,
        global_batch_size=spec.training.global_batch_size,
        micro_batch_size=job.micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        seed=spec.training.seed,
        shuffle=spec.data.shuffle,
    )
    validation_stream = None
    if validation is not None:
        validation_stream = ValidationStream(
            table(validation, "validation"),
            global_batch_size=spec.training.global_batch_size,
            micro_batch_size=job.micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            max_steps=spec.training.validation_batches,
        )
    return TextData(
        train=stream,
        validation=validation_stream,
        vocab_size=max(train.vocab_size, validation.vocab_size if validation else 0),
        unigram_entropy_nats=(validation or train).unigram_entropy_nats,
        tokenizer_digest=tokenizer.digest,
    )
