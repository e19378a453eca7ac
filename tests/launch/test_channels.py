"""Inputs: made absolute, checked to exist, one channel per distinct URI."""

from pathlib import Path

import pytest

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.channels import absolute_job, build_inputs
from trainyard.launch.local_paths import local_job
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import DataSource, ImageSpec, JobSpec
from trainyard.spec.platform import TenantContract


def with_train(job: JobSpec, *paths: str) -> JobSpec:
    content = job.model_dump(mode="json", exclude_none=True)
    content["data"]["train"] = [{"path": path, "format": "jsonl"} for path in paths]
    return parse(JobSpec, content, "job")


def test_inputs_become_channels(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    inputs = build_inputs(job, deployed.client("s3"), contract)
    assert [(channel.name, channel.location) for channel in inputs.channels] == [
        ("train-0", "s3://acme-data/sets/train/"),  # a folder: with its slash, or it would match train-2 as well
        ("validation-0", "s3://acme-data/sets/validation.jsonl"),
        ("tokenizer", "s3://acme-data/sets/tokenizer.json"),
    ]
    uris = {channel.uri for channel in inputs.channels}
    read = inputs.job.data
    assert uris == {read.train[0].path, read.validation[0].path, read.tokenizer}


def test_streamed_data_is_no_channel_but_must_be_there(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    s3 = deployed.client("s3")
    content = job.model_dump(mode="json", exclude_none=True)
    s3.put_object(Bucket=contract.buckets.data, Key="sets/chat.jinja", Body=b"{{ messages }}")
    content["data"] |= {"streaming": True, "chat_template": "tenant://sets/chat.jinja"}
    inputs = build_inputs(parse(JobSpec, content, "job"), s3, contract)
    assert [channel.name for channel in inputs.channels] == ["tokenizer", "chat-template"]
    assert inputs.job.data.train[0].path == "s3://acme-data/sets/train"
    assert inputs.job.data.chat_template == "s3://acme-data/sets/chat.jinja"
    content["data"]["train"][0]["path"] = "tenant://sets/nothing"
    with pytest.raises(AwsRefusedError, match="sets/nothing: there is nothing there"):
        build_inputs(parse(JobSpec, content, "job"), s3, contract)


def test_class_names_are_an_input(
    deployed: Account, job: JobSpec, contract: TenantContract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = deployed.client("s3")
    s3.put_object(Bucket=contract.buckets.data, Key="sets/names.txt", Body=b"cat")

    def named(path: str) -> JobSpec:
        return job.model_copy(update={"images": ImageSpec(class_names=path)})

    inputs = build_inputs(named("tenant://sets/names.txt"), s3, contract)
    assert inputs.job.images is not None
    assert inputs.job.images.class_names == "s3://acme-data/sets/names.txt"
    assert "class-names" in [channel.name for channel in inputs.channels]
    with pytest.raises(InputError, match=r"images.class_names: 'names.txt' can't be read from a training host"):
        build_inputs(named("names.txt"), s3, contract)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.tar").write_bytes(b"a shard")
    data = job.data.model_copy(
        update={"train": (DataSource(path="train.tar", format="webdataset"),), "validation": (), "tokenizer": None}
    )
    here = named("names.txt").model_copy(update={"data": data})
    with pytest.raises(InputError, match=r"images.class_names: names.txt: no such file"):
        local_job(here)
    (tmp_path / "names.txt").write_text("cat")
    images = local_job(here).images
    assert images is not None
    assert images.class_names == str(tmp_path / "names.txt")


def test_a_folder_does_not_take_in_its_neighbour(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    s3 = deployed.client("s3")
    s3.put_object(Bucket=contract.buckets.data, Key="sets/train-2/part.jsonl", Body=b"{}")
    s3.delete_object(Bucket=contract.buckets.data, Key="sets/train/part-0.jsonl")
    with pytest.raises(AwsRefusedError, match="s3://acme-data/sets/train: there is nothing there"):
        build_inputs(job, s3, contract)


def test_a_file_takes_in_its_neighbour_which_a_jobs_own_role_may_not_read(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    s3 = deployed.client("s3")
    own = contract.model_copy(update={"job_boundary": "arn:aws:iam::123456789012:policy/boundary"})
    assert build_inputs(job, s3, own) == build_inputs(job, s3, contract)
    s3.put_object(Bucket=contract.buckets.data, Key="sets/tokenizer.json/below", Body=b"{}")
    assert build_inputs(job, s3, own) == build_inputs(job, s3, contract)
    s3.put_object(Bucket=contract.buckets.data, Key="sets/tokenizer.json.old", Body=b"{}")
    told = (
        r"sets/tokenizer.json: SageMaker would also bring s3://acme-data/sets/tokenizer.json.old, .* move one of them"
    )
    with pytest.raises(AwsRefusedError, match=told):
        build_inputs(job, s3, own)
    assert len(build_inputs(job, s3, contract).channels) == 3, "the tenant's one role reads all of its buckets"
    both = with_train(job, "tenant://sets/tokenizer.json.old")
    assert len(build_inputs(both, s3, own).channels) == 3, "the other is an input of the job as well"


def test_one_uri_is_one_channel(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    twice = with_train(job, "tenant://sets/train", "s3://acme-data/sets/train/")
    names = [channel.name for channel in build_inputs(twice, deployed.client("s3"), contract).channels]
    assert names == ["train-0", "validation-0", "tokenizer"]


def test_an_exported_model_is_read_from_the_artifacts_bucket(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    s3 = deployed.client("s3")
    for name in ("config.json", "pytorch_model.bin"):
        s3.put_object(Bucket=contract.buckets.artifacts, Key=f"models/acme-tiny/x/{name}", Body=b"{}")
    named = job.model_copy(update={"model": job.model.model_copy(update={"source": "artifact://models/acme-tiny/x"})})
    inputs = build_inputs(named, s3, contract)
    assert inputs.job.model.source == "s3://acme-artifacts/models/acme-tiny/x"
    assert inputs.channels[-1].location == "s3://acme-artifacts/models/acme-tiny/x/"
    old = contract.model_copy(update={"buckets": contract.buckets.model_copy(update={"artifacts": ""})})
    with pytest.raises(InputError, match=r"model.source: .* has no artifacts bucket yet; deploy its stacks again"):
        absolute_job(named, old)


def test_a_missing_bucket_is_named(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    with pytest.raises(AwsRefusedError, match="there is no bucket nowhere-at-all; the tenant's buckets are acme-data"):
        build_inputs(with_train(job, "s3://nowhere-at-all/train"), deployed.client("s3"), contract)


def test_file_system_paths_are_channels_without_a_look(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    inputs = build_inputs(with_train(job, "fsx://sets/train/"), deployed.client("s3"), contract)
    assert (inputs.channels[0].kind, inputs.channels[0].location) == ("fsx", "sets/train")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/home/me/train", "can't be read from a training host"),
        ("meta-llama/Llama-3.1-8B", "can't be read from a training host"),
        ("http://example.com/train", "can't be read from a training host"),
        ("tenant://", "names no path"),
        ("s3://acme-data", "is a whole bucket"),
    ],
)
def test_a_path_no_host_can_read_is_refused(job: JobSpec, contract: TenantContract, path: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        absolute_job(with_train(job, path), contract)
    assert str(refused.value).startswith("data.train.0.path: ")
    if "can't be read" in message:  # a file is copied without --recursive, which is for folders
        assert "(aws s3 cp FILE s3://acme-data/<path>, for a folder with --recursive" in str(refused.value)


def test_more_inputs_than_sagemaker_takes(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    many = with_train(job, *(f"fsx://sets/{index}" for index in range(20)))
    with pytest.raises(InputError, match="put them under fewer folders"):
        build_inputs(many, deployed.client("s3"), contract)
