"""The paths of a job on this machine: made absolute, and refused before a process starts where they can't be used."""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.channels import is_streamed
from trainyard.spec.checkpoint_names import HOME, LEADS_NOWHERE, broken_link
from trainyard.spec.data_files import (
    BROKEN,
    FOR_ALL,
    files_of,
    no_file,
    not_a_file,
    not_a_tokenizer,
    not_one_byte,
    sources_by_name,
    tokenizer_file_of,
)
from trainyard.spec.job import DataSource, JobSpec
from trainyard.spec.model_files import check_weight_files, folder_of, not_a_folder


class NotHereError(InputError):
    """A path that leads to nothing on this machine."""


_PLACES = ("destination", "local_directory")
_FROM_THE_HUB = "nothing is asked of the Hugging Face Hub: `hf download ID --local-dir FOLDER`, and give FOLDER"


def local_job(job: JobSpec, *, runs_here: bool = True) -> JobSpec:
    """`job` with absolute paths: a resume from another folder reads the same. InputError where one isn't here, or has
    nothing in it that the job could read; `runs_here`: on this machine, and not on others that share its files."""
    data = job.data
    changes: dict[str, Any] = {
        kind: tuple(
            source
            if is_streamed(job, source.path)
            else source.model_copy(update={"path": _local_path(source.path, f"data.{kind}.{index}.path")})
            for index, source in enumerate(getattr(data, kind))
        )
        for kind in ("train", "validation")
    }
    if data.tokenizer:
        changes["tokenizer"] = _local_path(data.tokenizer, "data.tokenizer")
    if data.chat_template:
        changes["chat_template"] = _file(_local_path(data.chat_template, "data.chat_template"), "data.chat_template")
    model = job.model
    if model.source is not None:
        source = _local_path(model.source, "model.source", f"; {_FROM_THE_HUB}")
        if Path(source).is_file():
            raise not_a_folder(source)
        model = model.model_copy(update={"source": source})
    images = job.images
    if images and images.class_names:
        names = _file(_local_path(images.class_names, "images.class_names"), "images.class_names")
        images = images.model_copy(update={"class_names": names})
    data = data.model_copy(update=changes)
    found = job.model_copy(update={"data": data, "model": model, "images": images})
    check_held(found, runs_here=runs_here)
    return found


def saving_here(job: JobSpec) -> JobSpec:
    """`job` with absolute paths of what it saves on this machine: a resume from another folder would look for its
    checkpoints there, find none, and begin anew."""
    places = {name: _absolute(getattr(job.checkpoint, name)) for name in _PLACES}
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=places)})


def check_read(job: JobSpec) -> None:
    """InputError where this user may not read what a job with absolute paths reads, or its model's weights are not
    whole: its ranks would say so later.

    Of a folder of data its list alone is looked at; it may hold a million files.
    """
    for where, path in _read_paths(job):
        if "://" in path:
            continue
        try:
            if Path(path).is_dir():
                with os.scandir(path):
                    pass
            elif not Path(path).is_file():  # who opens a pipe waits at it
                raise InputError(f"{where}: {path}: is neither a file nor a folder")
            else:
                with Path(path).open("rb"):
                    pass
        except OSError as error:
            raise _unread(where, path, error) from None
    if job.model.source and "://" not in job.model.source:
        check_weight_files(job.model.source)
    place = job.data.tokenizer or job.model.source
    try:
        if place and (file := _tokenizer_file(job)) is not None:
            with file.open("rb"):
                pass
    except OSError as error:
        raise _unread("tokenizer", place, error) from None


def _unread(where: str, path: str | None, error: OSError) -> InputError:
    return InputError(f"{where}: {path}: can't be read: {error.strerror}")


def _tokenizer_file(job: JobSpec) -> Path | None:
    """None where there is none, or none here; OSError where nobody may look for it."""
    is_elsewhere = "://" in (job.data.tokenizer or job.model.source or "")
    return None if job.task == "image_classification" or is_elsewhere else tokenizer_file_of(job)


def check_held(job: JobSpec, *, runs_here: bool = True) -> None:
    """InputError where what a job with absolute paths reads has nothing for it: no file of its format, not one byte, no
    model, no tokenizer. Its ranks would say so once they are up. What this user may not look at, theirs may, and what
    links lead to on their machines."""
    for_all = FOR_ALL if runs_here else FOR_ALL - {BROKEN}
    for kind in ("train", "validation"):
        for index, source in enumerate(getattr(job.data, kind)):
            _check_files(source, f"data.{kind}.{index}.path: {source.path}", for_all)
    _check_bytes(job.data.train, "data.train", for_all)
    for name, sources in sources_by_name(job.data.validation).items():
        _check_bytes(sources, "data.validation" + (f" ({name})" if name else ""), for_all)
    with contextlib.suppress(OSError):
        if job.model.source and "://" not in job.model.source:
            folder_of(job.model.source)
    _check_tokenizer(job)


def _check_files(source: DataSource, where: str, for_all: Set[str]) -> None:
    left_out: dict[Path, str] = {}
    if "://" in source.path:
        return
    with contextlib.suppress(OSError):
        for path, why in files_of(source):
            if why is None:
                return
            left_out[path] = why
        if for_all >= set(left_out.values()):
            told = [f"{path.relative_to(source.path).as_posix()} ({why})" for path, why in left_out.items()]
            raise no_file(where, source, told)


def _check_bytes(sources: Sequence[DataSource], where: str, for_all: Set[str]) -> None:
    def may_have_some(path: Path, why: str | None) -> bool:
        return why not in for_all if why else path.stat().st_size > 0 or not path.is_file()

    with contextlib.suppress(OSError):
        if not any("://" in one.path or any(itertools.starmap(may_have_some, files_of(one))) for one in sources):
            raise not_one_byte(where, sources)


def _check_tokenizer(job: JobSpec) -> None:
    with contextlib.suppress(OSError):
        if (file := _tokenizer_file(job)) is None:
            return
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            why = f"{error}; is it whole, and no pointer of Git LFS?"
        else:
            if isinstance(content, dict) and "model" in content:
                return
            why = "it has no model"
        raise not_a_tokenizer(file, why)


def check_places(written: JobSpec, job: JobSpec) -> None:
    """InputError where a job can't save where it states: a file in a folder's place, no rights, a disk that isn't
    there. A folder that isn't there yet is made by its ranks, in one that must be there and take it.

    `written`: the job as it was written, which may leave a place to us; `job`: with absolute paths.
    """
    for name in _PLACES:
        place = getattr(job.checkpoint, name)
        if getattr(written.checkpoint, name) is None or place is None or "://" in place:
            continue
        where, path = f"checkpoint.{name} {place}", Path(place)
        if (link := broken_link(path)) is not None:
            raise InputError(f"{where}: {link} {LEADS_NOWHERE}")
        there = next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), path)
        if not there.is_dir():
            raise InputError(f"{where}: {there} is no folder; name another place, or move that away")
        try:
            Path(tempfile.mkdtemp(prefix=".trainyard-", dir=there)).rmdir()  # root passes who only asks for rights
        except OSError as error:
            raise InputError(
                f"{where}: nothing may be written to {there} by this user: {error.strerror}; name another place"
            ) from None


def _read_paths(job: JobSpec) -> Iterator[tuple[str, str]]:
    for kind in ("train", "validation"):
        for index, source in enumerate(getattr(job.data, kind)):
            yield f"data.{kind}.{index}.path", source.path
    stated = {
        "data.tokenizer": job.data.tokenizer,
        "data.chat_template": job.data.chat_template,
        "images.class_names": job.images.class_names if job.images else None,
        "model.source": job.model.source,
    }
    yield from ((where, path) for where, path in stated.items() if path)


def _absolute(place: str | None) -> str | None:
    """A folder that need not be there yet."""
    return place if place is None or "://" in place else str(Path(place).absolute())


def _local_path(path: str, where: str, hint: str = "") -> str:
    if "://" in path:
        raise NotHereError(
            f"{where}: {path} is not on this machine, and without a tenant's environment only files are read: "
            "download it"
        )
    try:
        is_there = Path(path).exists()
    except OSError as error:  # a folder that may not be looked into, a name that no file system takes
        raise InputError(f"{where}: {path!r}: can't be looked at: {error.strerror}") from None
    if not is_there:
        home = f": {HOME}" if path.startswith("~") else hint
        raise NotHereError(f"{where}: {path}: no such file or folder (looked from {Path.cwd()}){home}")
    return str(Path(path).resolve())


def _file(path: str, where: str) -> str:
    if Path(path).is_dir():
        raise not_a_file(where, path)
    return path
