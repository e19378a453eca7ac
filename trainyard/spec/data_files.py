"""Which files a job's data and its tokenizer are: one rule for the trainer, which reads them, and for who looks at a
job's paths before a process starts."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainyard.errors import InputError
from trainyard.spec.job import DataSource, JobSpec, ValidationSource

SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
    "webdataset": (".tar",),
}
"""What the names of a folder's files end in, by format; any name for text."""

_PACKINGS = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip")

NEARLY = "packed in a way that is not read, or its name ends in capitals"
"""Why what `is_nearly_wanted` is left out."""
_LINK, BROKEN = "a link to a folder, which is not followed", "a link to nothing"
FOR_ALL = frozenset({NEARLY, _LINK, BROKEN})
"""Reasons that don't hang on who asks; the others are what the system says to this user."""

TOKENIZER = "tokenizer.json"

_NUM_SHOWN = 4


def files_of(source: DataSource) -> Iterator[tuple[Path, str | None]]:
    """Each file of a source on this machine that is read, with None, and each that is left out of a folder, with the
    reason, hidden ones apart; as the folder is walked, so that who asks for one waits for no million. Links to folders
    are not followed: what they lead to may be there already. OSError where the source itself can't be read."""
    root = Path(source.path)
    if not root.is_dir():
        yield root, None
        return
    unlisted: list[OSError] = []

    def unread(error: OSError) -> None:
        if Path(error.filename) == root:
            raise error
        unlisted.append(error)

    for folder, names, found in os.walk(root, onerror=unread):
        names[:] = [name for name in names if not name.startswith(".")]
        for path in (Path(folder, name) for name in names):
            if path.is_symlink():
                yield path, _LINK
        yield from _files_in(Path(folder), found, root, source)
    yield from ((Path(error.filename), _reason(error)) for error in unlisted)


def _files_in(folder: Path, names: Sequence[str], root: Path, source: DataSource) -> Iterator[tuple[Path, str | None]]:
    for path in (folder / name for name in names):
        if not is_wanted(own := path.relative_to(root).as_posix(), source):
            if is_nearly_wanted(own, source):
                yield path, NEARLY
            continue
        try:
            if path.is_file():
                yield path, None
            elif path.is_symlink():
                yield path, BROKEN
        except OSError as error:
            yield path, _reason(error)


def _reason(error: OSError) -> str:
    return error.strerror or "can't be read"


def is_wanted(name: str, source: DataSource) -> bool:
    """Whether a file of a folder, by its path below it, belongs to the source: not hidden, and of its format."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and name.endswith(SUFFIXES.get(source.format, ""))


def is_nearly_wanted(name: str, source: DataSource) -> bool:
    """Whether a file that isn't wanted would be, unpacked or with a name in small letters."""
    plain = name.lower().replace(".tgz", ".tar.gz")
    for packing in _PACKINGS:
        plain = plain.removesuffix(packing)
    return not is_wanted(name, source) and is_wanted(plain, source)


def told_left_out(left_out: Sequence[str]) -> str:
    """What is left out of a source, each with its reason, in a few words."""
    more = f" and {len(left_out) - _NUM_SHOWN} more" if len(left_out) > _NUM_SHOWN else ""
    return f"{', '.join(sorted(left_out)[:_NUM_SHOWN])}{more}"


def no_file(where: str, source: DataSource, left_out: Sequence[str] = ()) -> InputError:
    """The error for a folder without a file of the format."""
    suffixes = SUFFIXES.get(source.format)
    wanted = f"no file that ends in {', '.join(suffixes)}" if suffixes else "no file"
    without = f", but {told_left_out(left_out)}" if left_out else ""
    mend = "put some there, or correct the path" + (" or the format" if suffixes else "")
    return InputError(f"{where}: {wanted} (format: {source.format}){without}; {mend}")


def not_a_file(where: str, path: str) -> InputError:
    """The error for a folder where one file is wanted."""
    return InputError(f"{where}: {path}: is a folder; name the file in it")


def not_one_byte(where: str, sources: Sequence[DataSource]) -> InputError:
    """The error for sources that together hold nothing."""
    paths = ", ".join(source.path for source in sources)
    return InputError(f"{where}: {paths}: not one byte; give files with some text, or take the source out")


def sources_by_name(sources: Sequence[ValidationSource]) -> dict[str | None, tuple[ValidationSource, ...]]:
    """The sources of each validation set, in the order of the job."""
    names = dict.fromkeys(source.name for source in sources)
    return {name: tuple(source for source in sources if source.name == name) for name in names}


def tokenizer_file_of(job: JobSpec) -> Path | None:
    """The tokenizer.json of the job: of `data.tokenizer`, else the one beside a local `model.source`; None for bytes,
    and where ready-made ids need none."""
    if job.data.tokenizer is not None:
        return _tokenizer_file(job.data.tokenizer, "data.tokenizer")
    source = job.model.source
    if source is None or (is_ready_made(job) and not (Path(source) / TOKENIZER).is_file()):
        return None
    return _tokenizer_file(source, "model.source")


def is_ready_made(job: JobSpec) -> bool:
    """Whether all that the job reads is token ids."""
    return all(source.format == "tokens" for source in (*job.data.train, *job.data.validation))


def _tokenizer_file(location: str, field: str) -> Path:
    path = Path(location)
    if "://" in location or not path.exists():
        raise InputError(f"{field} {location}: the tokenizer must be a local tokenizer.json or a folder that holds one")
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise no_tokenizer(field, location)
    return file


def no_tokenizer(field: str, location: str) -> InputError:
    """The error for a folder without one."""
    otherwise = "correct the path" if field == "data.tokenizer" else "set data.tokenizer"
    return InputError(f"{field} {location}: holds no {TOKENIZER}; save the tokenizer in its fast form, or {otherwise}")


def not_a_tokenizer(file: object, why: str) -> InputError:
    """The error for a file in a tokenizer's place that is none."""
    return InputError(f"tokenizer {file}: is not a {TOKENIZER} ({why})")
