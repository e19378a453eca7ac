"""Data: files -> tokens in a memory-mapped cache -> the global batches of every step, resumable on any number of ranks.

`build_data(job, data_parallel_rank=, data_parallel_size=, cache_dir=)` gives a `JobData`:
- `.train`: `BatchStream`. `next_step()` gives this rank's micro-batches of one optimizer step; `state_dict()` and
  `load_state_dict()` hold its position: sequences over one global order, so that it outlives a change of ranks.
- `.validation`: `ValidationStream` or None, the same batches at every validation; `.named_validation`: further sets.
- `.vocab_size`, `.unigram_entropy_nats`, `.tokenizer_digest`.

Inside: `files` -> `readers` (formats, units) -> `chat` and `documents` (text, tokens, masks) -> `token_units` and
`token_cache` (on disk, once per host; `shared_work`: who works, who waits) -> `stream` (order, batches). `webdataset`
reads shards of samples.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.build import JobData, TextData, ValidationSet, build_data, part_cache
    from trainer.data.stream import IGNORED_LABEL, BatchStream, MicroBatch, ValidationStream

__all__ = [
    "IGNORED_LABEL",
    "BatchStream",
    "JobData",
    "MicroBatch",
    "TextData",
    "ValidationSet",
    "ValidationStream",
    "build_data",
    "part_cache",
]

_STREAM = {"IGNORED_LABEL", "BatchStream", "MicroBatch", "ValidationStream"}


def __getattr__(name: str) -> Any:
    """These need torch, which takes seconds to import; who only tokenizes (`prepare_stdlib`) does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{'stream' if name in _STREAM else 'build'}"), name)
