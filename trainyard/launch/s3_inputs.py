"""What a tenant's job reads in its buckets, looked into before machines are waited and paid for: by the rules by which
files on this machine are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainyard.launch.aws import DENIED_CODES, aws_errors, error_code, is_missing
from trainyard.spec.data_files import (
    NEARLY,
    TOKENIZER,
    is_nearly_wanted,
    is_ready_made,
    is_wanted,
    no_file,
    no_tokenizer,
    not_a_file,
    not_a_tokenizer,
    not_one_byte,
    sources_by_name,
)
from trainyard.spec.job import DataSource, JobSpec
from trainyard.spec.model_files import check_weight_files, is_pointer, no_config, not_a_folder

_MOST_PAGES = 20
"""Of 1,000 keys each: of a folder with more that are of no use nothing is said, as each page takes a round trip."""
_FIRST_BYTES = 128 * 1024
"""Read of a file at first: most headers of weights are shorter, and each further read is a round trip."""


def check_on_s3(s3: Any, job: JobSpec, locations: Mapping[str, str]) -> None:
    """InputError where what a job with absolute URIs reads on S3 has nothing for it: no file of its format, not one
    byte, no model, weights that are not whole, no tokenizer. Its ranks would say so once they are up.

    `locations`: by URI, an object's own or a folder's, which ends in "/". Of data the keys are listed, of weights the
    headers read. What this caller may not read is left to the job, whose role may.
    """
    for kind in ("train", "validation"):
        sources = getattr(job.data, kind)
        held = {
            source.path: _may_have_bytes(s3, source, locations, f"data.{kind}.{index}.path: {source.path}")
            for index, source in enumerate(sources)
        }
        sets = sources_by_name(sources) if kind == "validation" else {None: sources}
        for name, of_set in sets.items():
            if of_set and not any(held[source.path] for source in of_set):
                raise not_one_byte(f"data.{kind}" + (f" ({name})" if name else ""), of_set)
    files = {"data.chat_template": job.data.chat_template}
    files["images.class_names"] = job.images.class_names if job.images else None
    for where, uri in files.items():
        if uri and locations.get(uri, "").endswith("/"):
            raise not_a_file(where, uri)
    _check_model_and_tokenizer(s3, job, locations)


def _may_have_bytes(s3: Any, source: DataSource, locations: Mapping[str, str], where: str) -> bool:
    """False where a source is known to have none; InputError where it has no file of its format."""
    location = locations.get(source.path)
    if location is None:
        return True
    pages = _listed(s3, location)
    if not location.endswith("/"):
        return any(size for name, size in next(pages) if not name)
    left_out: list[str] = []
    is_blank = False
    for number, listed in enumerate(pages):
        if number == _MOST_PAGES:
            return True
        # A console marks folders with keys that end so.
        page = [(name, size) for name, size in listed if name and not name.endswith("/")]
        wanted = [size for name, size in page if is_wanted(name, source)]
        if any(wanted):
            return True
        is_blank = is_blank or bool(wanted)
        left_out += [f"{name} ({NEARLY})" for name, _ in page if is_nearly_wanted(name, source)]
    if not is_blank:
        raise no_file(where, source, left_out)
    return False


def _listed(s3: Any, location: str, **more: str) -> Iterator[list[tuple[str, int]]]:
    """Pages of what is at a location: the names below it ("": the object itself), and bytes."""
    bucket, _, key = location.removeprefix("s3://").partition("/")
    with aws_errors("listing", location):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key, **more):
            yield [(item["Key"].removeprefix(key), int(item["Size"])) for item in page.get("Contents", ())]


def _check_model_and_tokenizer(s3: Any, job: JobSpec, locations: Mapping[str, str]) -> None:
    """InputError as `check_on_s3`."""
    source = job.model.source
    model = _S3Files(s3, locations[source]) if source and locations.get(source, "").endswith("/") else None
    if source in locations and model is None:
        raise not_a_folder(str(source))
    with _what_is_seen():
        if source and model:
            if not model.is_there("config.json"):
                raise no_config(source)
            check_weight_files(source, model)
    if job.task == "image_classification":
        return
    with _what_is_seen():
        stated = job.data.tokenizer
        if stated is None:
            if source and model and (model.is_there(TOKENIZER) or not is_ready_made(job)):
                _check_tokenizer(model, "model.source", source)
        elif (place := locations.get(stated, "")).endswith("/"):
            _check_tokenizer(_S3Files(s3, place), "data.tokenizer", stated)
        elif place:
            folder, _, name = place.rpartition("/")
            _check_tokenizer_file(_S3Files(s3, f"{folder}/"), name, stated)


def _check_tokenizer(files: "_S3Files", field: str, uri: str) -> None:
    if not files.is_there(TOKENIZER):
        raise no_tokenizer(field, uri)
    _check_tokenizer_file(files, TOKENIZER, f"{uri}/{TOKENIZER}")


def _check_tokenizer_file(files: "_S3Files", name: str, uri: str) -> None:
    """By how it begins: an object is there as it was sent, and a large vocabulary's takes seconds to read."""
    begin = files.read(name, 0, _FIRST_BYTES).lstrip()
    if is_pointer(begin):
        raise not_a_tokenizer(uri, "a pointer of Git LFS, not the file: git lfs pull, or hf download")
    if not begin.startswith(b"{"):
        raise not_a_tokenizer(uri, "no JSON object")


class _UnseenError(Exception):
    """The caller may not look there."""


@contextmanager
def _what_is_seen() -> Iterator[None]:
    try:
        yield
    except _UnseenError:
        return


class _S3Files:
    """`model_files.Files` of a folder in a bucket."""

    def __init__(self, s3: Any, location: str) -> None:
        self._s3, self._location = s3, location
        self._sizes = {name: size for page in _listed(s3, location, Delimiter="/") for name, size in page}
        self._first: dict[str, bytes] = {}

    def is_there(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise FileNotFoundError(name)
        return self._sizes[name]

    def read(self, name: str, offset: int = 0, num_bytes: int = -1) -> bytes:
        size = self.size(name)
        end = size if num_bytes < 0 else min(size, offset + num_bytes)
        if name not in self._first:
            self._first[name] = self._fetch(name, 0, min(size, _FIRST_BYTES))
        first = self._first[name]
        return first[offset:end] if end <= len(first) else self._fetch(name, offset, end)

    def _fetch(self, name: str, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""  # a range of no bytes is refused
        bucket, _, folder = self._location.removeprefix("s3://").partition("/")
        with aws_errors("reading", f"{self._location}{name}"):
            try:
                found = self._s3.get_object(Bucket=bucket, Key=folder + name, Range=f"bytes={begin}-{end - 1}")
            except self._s3.exceptions.ClientError as error:
                if error_code(error) in DENIED_CODES:
                    raise _UnseenError from None
                if is_missing(error):
                    raise FileNotFoundError(name) from None
                raise
            content: bytes = found["Body"].read()
        return content
