"""What a job reads: its URIs made absolute, checked to exist, and turned into SageMaker input channels."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.record import JobRecord, RecordedChannel
from trainyard.launch.s3_inputs import check_on_s3
from trainyard.spec.job import DataSource, JobSpec
from trainyard.spec.platform import TenantContract

MAX_CHANNELS = 20
"""SageMaker's limit (CreateTrainingJob, InputDataConfig)."""
JOB_CHANNEL = "job"
"""The channel that carries the spec: hyperparameters hold at most 256 characters each."""


@dataclass(frozen=True)
class Channel:
    """One input channel: an S3 prefix, or a directory of the tenant's file system."""

    name: str
    kind: Literal["s3", "fsx"]
    location: str
    """s3: the URI (a folder ends in "/", or its prefix would match its neighbours); fsx: the path below the mount."""
    uri: str
    """As it stands in the resolved job."""


@dataclass(frozen=True)
class Inputs:
    """A job's inputs as SageMaker gets them."""

    job: JobSpec
    """The spec with every URI absolute (s3:// or fsx://)."""
    channels: tuple[Channel, ...]
    """One per distinct URI; the `job` channel is not among them."""


def absolute_job(job: JobSpec, contract: TenantContract) -> JobSpec:
    """`job` with tenant:// and artifact:// resolved; InputError names a URI that a training host can't read."""

    def source(item: DataSource, where: str) -> DataSource:
        return item.model_copy(update={"path": _absolute(item.path, where, contract)})

    train = tuple(source(item, f"data.train.{index}.path") for index, item in enumerate(job.data.train))
    validation = tuple(source(item, f"data.validation.{index}.path") for index, item in enumerate(job.data.validation))
    tokenizer = _absolute(job.data.tokenizer, "data.tokenizer", contract) if job.data.tokenizer else None
    template = _absolute(job.data.chat_template, "data.chat_template", contract) if job.data.chat_template else None
    model_source = _absolute(job.model.source, "model.source", contract) if job.model.source else None
    images = job.images
    if images and images.class_names:
        names = _absolute(images.class_names, "images.class_names", contract)
        images = images.model_copy(update={"class_names": names})
    data = job.data.model_copy(
        update={"train": train, "validation": validation, "tokenizer": tokenizer, "chat_template": template}
    )
    model = job.model.model_copy(update={"source": model_source})
    return job.model_copy(update={"data": data, "model": model, "images": images})


def _absolute(uri: str, where: str, contract: TenantContract) -> str:
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in {"s3", "tenant", "artifact", "fsx"}:
        raise InputError(
            f"{where}: {uri!r} can't be read from a training host, which has no internet and none of your files; "
            f"copy it to the tenant's data bucket as its launcher (aws s3 cp FILE s3://{contract.buckets.data}/<path>, "
            "for a folder with --recursive; docs/data.md) and "
            "write tenant://<path>, artifact://<path>, s3://<bucket>/<path> or fsx://<path>"
        )
    if not rest.strip("/"):
        raise InputError(f"{where}: {uri!r} names no path; write {scheme}://<path>")
    if scheme == "tenant":
        return f"s3://{contract.buckets.data}/{rest.strip('/')}"
    if scheme == "artifact":
        if not contract.buckets.artifacts:
            raise InputError(f"{where}: {uri!r}: the tenant has no artifacts bucket yet; deploy its stacks again")
        return f"s3://{contract.buckets.artifacts}/{rest.strip('/')}"
    if scheme == "s3" and "/" not in rest.strip("/"):
        raise InputError(f"{where}: {uri!r} is a whole bucket; name a folder or a file in it: {uri.rstrip('/')}/<path>")
    return f"{scheme}://{rest.strip('/')}"


def build_inputs(job: JobSpec, s3: Any, contract: TenantContract) -> Inputs:
    """Every input of `job` as a channel, apart from what is streamed; asks S3 whether each exists and has what is read.

    AwsRefusedError where one doesn't, InputError where it hasn't.
    """
    absolute = absolute_job(job, contract)
    channels: dict[str, Channel] = {}
    locations: dict[str, str] = {}
    for name, uri in _named_uris(absolute):
        if uri in channels or uri in locations:
            continue
        if uri.startswith("fsx://"):
            channels[uri] = Channel(name, "fsx", uri.removeprefix("fsx://"), uri)
            continue
        location = locations[uri] = existing_s3_location(s3, uri, contract)
        if not is_streamed(absolute, uri):
            if contract.job_boundary and not location.endswith("/"):
                _require_readable(s3, uri, [other for _, other in _named_uris(absolute)])
            channels[uri] = Channel(name, "s3", location, uri)
    if len(channels) + 1 > MAX_CHANNELS:
        raise InputError(
            f"data: {len(channels)} different inputs; SageMaker takes {MAX_CHANNELS - 1} beside the job's own: "
            "put them under fewer folders"
        )
    check_on_s3(s3, absolute, locations)
    return Inputs(absolute, tuple(channels.values()))


def inputs_as_written(job: JobSpec) -> tuple[RecordedChannel, ...]:
    """Every input of a job without a tenant, as a channel; nothing is asked of S3, so a folder there has to end in "/".

    InputError where one is neither on S3 nor on the shared file system.
    """
    channels: dict[str, RecordedChannel] = {}
    for name, uri in _named_uris(job):
        kind, separator, rest = uri.partition("://")
        if kind == "s3" and separator:
            if not is_streamed(job, uri):
                channels.setdefault(uri, RecordedChannel(name=name, kind="s3", location=uri, uri=uri))
        elif kind == "fsx" and separator:
            channels.setdefault(uri, RecordedChannel(name=name, kind="fsx", location=rest, uri=uri))
        else:
            raise InputError(
                f"{uri}: is on no machine of the cluster; write s3://BUCKET/FOLDER/, or fsx://PATH of its shared file "
                "system (tenant:// and artifact:// need --environment)"
            )
    return tuple(channels.values())


def job_files(record: JobRecord) -> dict[str, str]:
    """What a trainer outside of SageMaker is given of its job, by file name: the two files of the channel `job`, and
    `inputs.json`, what `trainer.inputs` brings."""
    listed = [{"name": item.name, "kind": item.kind, "location": item.location} for item in record.channels]
    return {
        "resolved_job.json": record.resolved.model_dump_json(indent=1),
        "channels.json": json.dumps({channel.uri: channel.name for channel in record.channels}),
        "inputs.json": json.dumps(listed),
    }


def spec_files(record: JobRecord) -> dict[str, str]:
    """By file name, what the channel `job` carries to SageMaker."""
    files = job_files(record)
    return {name: files[name] for name in ("resolved_job.json", "channels.json")}


def spec_name(record: JobRecord) -> str:
    """Of its content: where each spec has a place of its own, no later attempt writes over what a job was started with,
    and reads again whenever its machines change."""
    return hashlib.sha256(json.dumps(spec_files(record), sort_keys=True).encode()).hexdigest()[:16]


def is_streamed(job: JobSpec, uri: str) -> bool:
    """Whether the trainer reads it from S3 itself, as the job's role: with data.streaming, all data is."""
    data = [source.path for source in (*job.data.train, *job.data.validation)]
    return job.data.streaming and uri in data and uri.startswith("s3://")


def _named_uris(job: JobSpec) -> list[tuple[str, str]]:
    named = [(f"train-{index}", source.path) for index, source in enumerate(job.data.train)]
    named += [(f"validation-{index}", source.path) for index, source in enumerate(job.data.validation)]
    if job.data.tokenizer:
        named.append(("tokenizer", job.data.tokenizer))
    if job.data.chat_template:
        named.append(("chat-template", job.data.chat_template))
    if job.images and job.images.class_names:
        named.append(("class-names", job.images.class_names))
    if job.model.source:
        named.append(("model", job.model.source))
    return named


def existing_s3_location(s3: Any, uri: str, contract: TenantContract) -> str:
    """`uri` itself where it is an object, `uri/` where it is a folder; AwsRefusedError where it is neither."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    buckets = [name for name in contract.buckets.model_dump().values() if name]
    allowed = f"the tenant's buckets are {', '.join(buckets[:-1])} and {buckets[-1]}"
    with aws_errors("looking for", uri, f"is the bucket right? {allowed}"):
        try:
            # The listing is in key order: the object itself (if any) comes before everything below it.
            exact = s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", [])
            if exact and exact[0]["Key"] == key:
                return uri
            if s3.list_objects_v2(Bucket=bucket, Prefix=f"{key}/", MaxKeys=1).get("Contents"):
                return f"{uri}/"
        except s3.exceptions.ClientError as error:
            if error_code(error) == "NoSuchBucket":
                raise AwsRefusedError(f"{uri}: there is no bucket {bucket}; {allowed}") from None
            raise
    raise AwsRefusedError(
        f"{uri}: there is nothing there in bucket {bucket}; upload it (aws s3 cp FILE {uri}, or aws s3 cp --recursive "
        f"DIR {uri}/), or correct the path"
    )


def _require_readable(s3: Any, uri: str, inputs: Sequence[str]) -> None:
    """A file is a prefix to SageMaker, which brings all whose names begin so; a role of the job's own may read what is
    an input and what lies below one, so that anything else would end the job at its download."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    with aws_errors("looking beside", uri):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key):
            for item in page.get("Contents", []):
                found = f"s3://{bucket}/{item['Key']}"
                if not any(found == other or found.startswith(f"{other}/") for other in inputs):
                    raise AwsRefusedError(
                        f"{uri}: SageMaker would also bring {found}, whose name begins so, and the job's own role may "
                        "not read that; move one of them, or put the file into a folder and name the folder"
                    )
