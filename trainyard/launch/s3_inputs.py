"""What a tenant's job reads in its buckets, looked into before machines are waited and paid for: by the rules by which
files on this machine are."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
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
            (source.path, source.format): _may_have_bytes(
                s3, source, locations.get(source.path), f"data.{kind}.{index}.path: {source.path}"
            )
            for index, source in enumerate(sources)
        }
        sets = sources_by_name(sources) if kind == "validation" else {None: sources}
        for name, of_set in sets.items():
            if of_set and not any(held[source.path, source.format] for source in of_set):
                raise not_one_byte(f"data.{kind}" + (f" ({name})" if name else ""), of_set)
    files = {"data.chat_template": job.data.chat_template}
    files["images.class_names"] = job.images.class_names if job.images else None
    for where, uri in files.items():
        if uri and (place := locations.get(uri, "")).endswith("/"):
            with suppress(_UnseenError):
                if not _holds_its_name(s3, place):
                    raise not_a_file(where, uri)
    _check_model_and_tokenizer(s3, job, locations)


def _may_have_bytes(s3: Any, source: DataSource, location: str | None, where: str) -> bool:
    """False where a source is known to have none; InputError where it has no file of its format."""
    may_have_some = True
    if location is not None:
        with suppress(_UnseenError):
            if location.endswith("/"):
                may_have_some = _folder_may_have_bytes(s3, source, location, where)
            else:
                may_have_some = _size_of_file(s3, location) != 0
    return may_have_some


def _folder_may_have_bytes(s3: Any, source: DataSource, location: str, where: str) -> bool:
    """As `_may_have_bytes`."""
    left_out: list[str] = []
    is_blank = False
    for number, listed in enumerate(_listed(s3, location)):
        if number == _MOST_PAGES:
            return True
        # A console marks folders with keys that end so.
        page = [(name, size) for name, size in listed if name and not name.endswith("/")]
        wanted = [size for name, size in page if is_wanted(name, source)]
        if any(wanted):
            return True
        is_blank = is_blank or bool(wanted)
        left_out += [f"{name} ({NEARLY})" for name, _ in page if is_nearly_wanted(name, source)]
    if _holds_its_name(s3, location):
        return True
    if not is_blank:
        raise no_file(where, source, left_out)
    return False


def _size_of_file(s3: Any, location: str) -> int | None:
    """Bytes of an object; None where there is none."""
    return next((size for name, size in next(_listed(s3, location), []) if not name), None)


def _holds_its_name(s3: Any, location: str) -> bool:
    """Whether a folder holds a file of its own name, which a host takes for what was named (`trainer.entrypoint`): a
    file that was copied with a slash at its end."""
    name = location.rstrip("/").rpartition("/")[2]
    return _size_of_file(s3, location + name) is not None


def _listed(s3: Any, location: str, **more: str) -> Iterator[list[tuple[str, int]]]:
    """Pages of what is at a location: the names below it ("": the object itself), and bytes."""
    bucket, _, key = location.removeprefix("s3://").partition("/")
    with aws_errors("listing", location):
        try:
            for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key, **more):
                yield [(item["Key"].removeprefix(key), int(item["Size"])) for item in page.get("Contents", ())]
        except s3.exceptions.ClientError as error:
            if error_code(error) in DENIED_CODES:
                raise _UnseenError from None
            raise


def _check_model_and_tokenizer(s3: Any, job: JobSpec, locations: Mapping[str, str]) -> None:
    """InputError as `check_on_s3`."""
    source = job.model.source
    place = locations.get(source, "") if source else ""
    if source and place and not place.endswith("/"):
        raise not_a_folder(source)
    model = None
    with suppress(_UnseenError):
        if source and place:
            model = _S3Files.of_folder(s3, place)
            if not model.is_there("config.json"):
                raise no_config(source)
            check_weight_files(source, model)
    if job.task == "image_classification":
        return
    stated = job.data.tokenizer
    with suppress(_UnseenError):
        if stated and (at := locations.get(stated, "")):
            if not at.endswith("/"):
                _check_tokenizer_file(*_S3Files.of_file(s3, at), stated)
            elif not _holds_its_name(s3, at):
                _check_tokenizer(_S3Files.of_folder(s3, at), "data.tokenizer", stated)
        elif source and model and not stated and (model.is_there(TOKENIZER) or not is_ready_made(job)):
            _check_tokenizer(model, "model.source", source)


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
    """Nothing is known of what is there, as the caller may not look, say: it is left to the job."""


class _S3Files:
    """`model_files.Files` of a folder in a bucket."""

    def __init__(self, s3: Any, location: str, sizes: Mapping[str, int]) -> None:
        self._s3, self._location, self._sizes = s3, location, sizes
        self._first: dict[str, bytes] = {}

    @classmethod
    def of_folder(cls, s3: Any, location: str) -> "_S3Files":
        sizes: dict[str, int] = {}
        for number, page in enumerate(_listed(s3, location, Delimiter="/")):
            if number == _MOST_PAGES:
                raise _UnseenError
            sizes.update(page)
        return cls(s3, location, sizes)

    @classmethod
    def of_file(cls, s3: Any, location: str) -> tuple["_S3Files", str]:
        """Of the folder of an object, which alone is known of it, and its name there."""
        folder, _, name = location.rpartition("/")
        size = _size_of_file(s3, location)
        if size is None:
            raise _UnseenError
        return cls(s3, f"{folder}/", {name: size}), name

    def is_there(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        if name in self._sizes:
            return self._sizes[name]
        if "/" in name:
            raise _UnseenError  # a folder's folders are not listed
        raise FileNotFoundError(name)

    def read(self, name: str, offset: int = 0, num_bytes: int = -1) -> bytes:
        """As of `model_files.Files`; what is read of a header bit by bit comes in one request."""
        size = self.size(name)
        if num_bytes < 0:
            return self._fetch(name, offset, size)
        end = min(size, offset + num_bytes)
        if name not in self._first:
            self._first[name] = self._fetch(name, 0, min(size, _FIRST_BYTES))
        first = self._first[name]
        return first[offset:end] if end <= len(first) else self._fetch(name, offset, end)

    def _fetch(self, name: str, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""  # no such range can be written
        bucket, _, folder = self._location.removeprefix("s3://").partition("/")
        with aws_errors("reading", f"{self._location}{name}"):
            try:
                found = self._s3.get_object(Bucket=bucket, Key=folder + name, Range=f"bytes={begin}-{end - 1}")
            except self._s3.exceptions.ClientError as error:
                if error_code(error) in DENIED_CODES or is_missing(error):  # it went since it was listed
                    raise _UnseenError from None
                raise
            content: bytes = found["Body"].read()
        return content
