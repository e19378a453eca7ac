"""Ready-made tokens that stay in S3: read sequence by sequence, in the order of training, ahead of it.

What a local token cache knows from reading everything once is not known here: frequencies (and so the unigram entropy),
the largest id (each id is checked when it is read), and a digest of the tokens (it is one of sizes and ETags instead).
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.readers import TokenFile, files_of
from trainer.data.s3_files import PartCache, S3File
from trainer.data.token_cache import TokenCache, pieces
from trainer.data.token_units import Vocabulary, check_ids
from trainer.heartbeat import beat
from trainyard.errors import InputError
from trainyard.spec.job import DataSource

_HEADERS_AT_ONCE = 16
"""Every rank reads each file's header, a request of some 30 ms."""


class StreamedTokens:
    """Files of ids in S3 as one read-only array."""

    def __init__(self, files: Sequence[TokenFile], vocabulary: Vocabulary, parts: PartCache) -> None:
        self._files = files
        self._vocabulary = vocabulary
        self._parts = parts
        self.bounds = np.cumsum([0, *(file.num_tokens for file in files)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, stretch: slice) -> npt.NDArray[Any]:
        found = [np.zeros(0, dtype=self._vocabulary.dtype)]
        for number, begin, end in pieces(self.bounds, stretch):
            file = self._files[number]
            content = self._parts.read(*_range(file, begin, end)) if begin < end else b""
            ids = np.frombuffer(content, dtype=file.dtype)
            if len(ids):
                check_ids(ids, file.file.where, self._vocabulary)
            found.append(ids.astype(self._vocabulary.dtype))
        return np.concatenate(found)

    def will_read(self, stretch: slice) -> None:
        """Fetches a stretch in the background."""
        for number, begin, end in pieces(self.bounds, stretch):
            if begin < end:
                self._parts.will_read(*_range(self._files[number], begin, end))

    def close(self) -> None:
        """Ends the threads that fetch."""
        self._parts.close()


def _range(file: TokenFile, begin: int, end: int) -> tuple[S3File, int, int]:
    assert isinstance(file.file, S3File)
    size = file.dtype.itemsize
    return file.file, file.offset + begin * size, (end - begin) * size


def are_streamed(sources: Sequence[DataSource], *, streaming: bool) -> bool:
    """Whether the sources stay in S3: ready-made tokens do; anything else is tokenized as it is read. (A mixture is
    refused by `trainyard.spec.obstacles`.)"""
    return streaming and all(source.format == "tokens" and source.path.startswith("s3://") for source in sources)


def open_streamed_tokens(
    sources: Sequence[DataSource], vocabulary: Vocabulary, cache_dir: Path, *, cache_bytes: int
) -> TokenCache:
    """The tokens of sources in S3, nothing read but the files' headers; `cache_bytes` of them are kept on disk."""
    listed = [file for source in sources for file in files_of(source, streaming=True)]
    files = []
    with ThreadPoolExecutor(_HEADERS_AT_ONCE, thread_name_prefix="s3-headers") as threads:
        for file in threads.map(TokenFile.of, listed):
            files.append(file)
            beat()
    filled = [file for file in files if file.num_tokens]
    if not filled:
        raise InputError(f"data.train {', '.join(source.path for source in sources)}: holds no tokens")
    tokens = StreamedTokens(filled, vocabulary, PartCache(cache_dir, max_bytes=cache_bytes))
    facts = json.dumps([(file.file.version, file.file.size) for file in filled])
    return TokenCache(
        tokens,
        tokens.bounds[1:],
        hashlib.sha256(f"streamed {facts}".encode()).hexdigest(),
        unigram_entropy_nats=None,
        vocab_size=vocabulary.size,
    )
