"""/opt/ml of one host: written as SageMaker writes it, read back at the end."""

import json
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

_MAX_FAILURE_CHARACTERS = 1024
"""Of FailureReason, with all that SageMaker writes around the message."""


class ChannelError(Exception):
    """An input that can't be had: the job fails with this as its reason."""


def write_tree(root: Path, request: Mapping[str, Any], host: str, hosts: Sequence[str]) -> None:
    """The folders and input/config/*.json of one host under `root`."""
    for folder in ("input/config", "input/data", "model", "output/data", "code", "tmp"):
        (root / folder).mkdir(parents=True)
    kind = request["ResourceConfig"]["InstanceType"]
    group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": list(hosts)}
    resources = {
        "current_host": host,
        "current_instance_type": kind,
        "current_group_name": group["instance_group_name"],
        "hosts": list(hosts),
        "instance_groups": [group],
        "network_interface_name": "lo",
    }
    channels = {
        channel["ChannelName"]: _channel_config(request, channel) for channel in request.get("InputDataConfig") or []
    }
    for name, content in (
        ("resourceconfig", resources),
        ("inputdataconfig", channels),
        ("hyperparameters", request.get("HyperParameters") or {}),
    ):
        (root / "input" / "config" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def _channel_config(request: Mapping[str, Any], channel: Mapping[str, Any]) -> dict[str, str]:
    mode = channel.get("InputMode") or request["AlgorithmSpecification"].get("TrainingInputMode", "File")
    distribution = channel["DataSource"]["S3DataSource"].get("S3DataDistributionType", "FullyReplicated")
    config = {
        "TrainingInputMode": mode,
        "S3DistributionType": distribution,
        "RecordWrapperType": channel.get("RecordWrapperType", "None"),
    }
    return config | ({"ContentType": channel["ContentType"]} if channel.get("ContentType") else {})


def fetch_channels(s3: Any, request: Mapping[str, Any], trees: Sequence[Path]) -> None:
    """Every channel from S3 into each host's input/data; ChannelError names the URI that can't be had.

    All objects whose keys begin so, as SageMaker takes them (S3DataSource: "all objects that match the specified key
    name prefix"): of `data/train` those of `data/train2/` too.
    """
    for channel in request.get("InputDataConfig") or []:
        source = channel["DataSource"]["S3DataSource"]
        try:
            _fetch_channel(s3, channel["ChannelName"], source, trees)
        except ClientError as error:
            reason = error.response["Error"].get("Message") or error
            raise ChannelError(f"ClientError: Data download failed: {source['S3Uri']}: {reason}") from None


def _fetch_channel(s3: Any, name: str, source: Mapping[str, Any], trees: Sequence[Path]) -> None:
    uri = source["S3Uri"]
    bucket, prefix = split_uri(uri)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [item["Key"] for page in pages for item in page.get("Contents", []) if not item["Key"].endswith("/")]
    if not keys:
        raise ChannelError(
            f"ClientError: Data download failed: No S3 objects found under S3 URL {uri} given in input data source."
        )
    sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
    folders = [tree / "input" / "data" / name for tree in trees]
    for folder in folders:
        folder.mkdir(parents=True)
    for index, key in enumerate(keys):
        targets = [folders[index % len(folders)]] if sharded else folders
        first = targets[0] / _local_name(key, prefix)
        first.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, key, str(first))
        for other in targets[1:]:
            copy = other / _local_name(key, prefix)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(first, copy)


def _local_name(key: str, prefix: str) -> PurePosixPath:
    if key == prefix:
        return PurePosixPath(PurePosixPath(key).name)
    rest = key[len(prefix) :]
    if not prefix or prefix.endswith("/") or rest.startswith("/"):
        relative = PurePosixPath(rest.lstrip("/"))
    else:
        relative = PurePosixPath(key).relative_to(PurePosixPath(prefix).parent)
    if ".." in relative.parts:
        raise ChannelError(f"ClientError: Data download failed: the key {key} would leave its channel's folder")
    return relative


def split_uri(uri: str) -> tuple[str, str]:
    """s3://bucket/prefix as (bucket, prefix)."""
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc:
        raise ChannelError(f"ClientError: {uri} is not an s3:// URI")
    return parts.netloc, parts.path.lstrip("/")


def upload_artifacts(s3: Any, request: Mapping[str, Any], trees: Sequence[Path], scratch: Path) -> str:
    """model and output/data of all hosts as model.tar.gz and output.tar.gz under S3OutputPath; the model's URI."""
    output = request["OutputDataConfig"]
    base = f"{output['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}/output"
    extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": output["KmsKeyId"]} if output.get("KmsKeyId") else {}
    for name, folder in (("model", "model"), ("output", "output/data")):
        archive = scratch / f"{name}.tar.gz"
        if not _pack(archive, [tree / folder for tree in trees]):
            continue
        bucket, key = split_uri(f"{base}/{name}.tar.gz")
        s3.upload_file(str(archive), bucket, key, ExtraArgs=extra)
        archive.unlink()
    return f"{base}/model.tar.gz"


def _pack(archive: Path, folders: Iterable[Path]) -> int:
    """One archive of all folders' trees, each path once (the first host's wins); the number of files."""
    seen: set[Path] = set()
    num_files = 0
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                relative = path.relative_to(folder)
                if relative in seen:
                    continue
                seen.add(relative)
                tar.add(path, arcname=str(relative), recursive=False)
                num_files += path.is_file()
    return num_files


def failure_reason(trees: Sequence[Path], exit_codes: Mapping[str, int]) -> str:
    """FailureReason: the first failing host's output/failure, cut as SageMaker cuts it, with its exit code."""
    failed = [host for host, code in exit_codes.items() if code != 0]
    for tree in sorted(trees, key=lambda tree: tree.name not in failed):
        try:
            text = (tree / "output" / "failure").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text:
            return f"AlgorithmError: {text}, exit code: {exit_codes.get(tree.name, 1)}"[:_MAX_FAILURE_CHARACTERS]
    codes = ", ".join(f"{host} {code}" for host, code in exit_codes.items() if code != 0)
    silent = "AlgorithmError: the container ended without a message in /opt/ml/output/failure, exit code: "
    return f"{silent}{codes}"[:_MAX_FAILURE_CHARACTERS]
