"""What a job reads, brought to where its ranks look for it, where no SageMaker does that. Imports no torch."""

import json
import shutil
from pathlib import Path

from trainer.speech import say
from trainyard.errors import InputError, JobFailedError
from trainyard.spec.words import counted

SHARED_ROOT = "/fsx"
"""Where a tenant's machines mount its file system (fsx:// in a job)."""


def bring_inputs(directory: Path) -> None:
    """Every input that isn't there yet: a folder of /fsx as a link, what is on S3 as a copy. JobFailedError names it.

    `input/data/inputs.json`: a list of `name`, `kind` (s3 or fsx) and `location`, as a job's record has them.
    """
    folder = directory / "input/data"
    for item in _listed_inputs(folder / "inputs.json"):
        target = folder / item["name"]
        if item["kind"] == "fsx":
            source = Path(SHARED_ROOT) / str(item["location"]).strip("/")
            if not source.exists():
                raise InputError(f"fsx://{item['location']}: {source} is not on the cluster's file system")
            try:
                _link(source, target)
            except OSError as error:
                raise JobFailedError(f"fsx://{item['location']}: can't be linked as {target}: {error}") from None
        elif not target.exists():
            _copy_from_s3(str(item["location"]), target)


def _listed_inputs(path: Path) -> list[dict[str, str]]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [{key: str(item[key]) for key in ("name", "kind", "location")} for item in listed]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `trainyard launch` writes it as it submits the job") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: is no list of inputs with name, kind and location: {error!r}") from None


def _link(source: Path, target: Path) -> None:
    """`target` is the folder `source`, or a folder that holds the file `source` under its own name."""
    if target.is_symlink() and not target.exists():
        target.unlink()  # what it led to is gone, as after a move; the record says where it is now
    if target.exists():
        return
    if source.is_dir():
        target.symlink_to(source)
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed here
    partial.mkdir()
    (partial / source.name).symlink_to(source)
    partial.rename(target)


def _copy_from_s3(uri: str, target: Path) -> None:
    """What lies under `uri` into the folder `target`, there as a whole or not at all."""
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    count = 0
    try:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for found in page.get("Contents", []):
                key = str(found["Key"])
                if key.endswith("/") or (not prefix.endswith("/") and key != prefix):
                    continue
                # As SageMaker lays a channel out: below the prefix's last slash.
                file = _placed(partial, bucket, key, prefix.rfind("/") + 1)
                file.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, key, str(file))
                count += 1
    except (Boto3Error, BotoCoreError, ClientError, HTTPError, OSError) as error:
        raise JobFailedError(f"{uri}: can't be copied to {target}: {error}") from None
    if count == 0:
        raise InputError(f"{uri}: there is nothing there")
    partial.rename(target)
    say(f"inputs: {uri}: {counted(count, 'file')}")


def _placed(folder: Path, bucket: str, key: str, num_before: int) -> Path:
    """Where a key's file goes. S3 takes any name; one of these would write elsewhere on the machine, or over others."""
    parts = key[num_before:].split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise InputError(
            f"s3://{bucket}/{key}: is no path of a file below its prefix (an empty part, . or ..); copy it to a plain"
            " key, or take it away from there"
        )
    return folder.joinpath(*parts)
