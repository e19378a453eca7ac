"""What lies in a tenant's bucket and holds nothing that the job could read is refused before it is paid for."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import AwsAwayError, InputError
from trainyard.launch import s3_inputs
from trainyard.launch.channels import build_inputs
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
JSONL = r"no file that ends in \.jsonl, \.json, \.jsonl\.gz, \.json\.gz \(format: jsonl\)"


def weights(num_bytes: int, *, padding: int = 0) -> bytes:
    """A file in safetensors of one tensor; `padding`: bytes that make its header longer."""
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"note": "x" * padding}, "weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def model(**changes: bytes | None) -> dict[str, bytes]:
    """The files of a model in two shards; what `changes` names by its stem is other, or gone."""
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    files: dict[str, bytes | None] = {
        "config": json.dumps(CONFIG).encode(),
        "tokenizer": b'{"model": {}}',
        "index": json.dumps(index).encode(),
        "first": weights(64),
        "second": weights(200_000, padding=200_000),  # its header takes a second read
    }
    names = dict(zip(files, ["config.json", "tokenizer.json", "model.safetensors.index.json", *shards], strict=True))
    return {names[stem]: content for stem, content in (files | changes).items() if content is not None}


def refusal(s3: Any, contract: TenantContract, job: JobSpec, files: dict[str, bytes], **changes: Any) -> str:
    """What a launch of `job`, so changed, says with these files in the tenant's bucket; "" where it goes on."""
    for name, body in files.items():
        s3.put_object(Bucket=contract.buckets.data, Key=name, Body=body)
    content = job.model_dump(mode="json", exclude_none=True)
    content = {name: changes.pop(name, part) for name, part in content.items()} | changes
    try:
        build_inputs(parse(JobSpec, content, "job"), s3, contract)
    except InputError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("files", "changes", "told"),
    [
        ({"a.txt": b"a text"}, {}, rf"^data\.train\.0\.path: s3://acme-data/x: {JSONL}; put some there, or correct"),
        ({"a.jsonl.zst": b"z"}, {}, rf"/x: {JSONL}, but a\.jsonl\.zst \(packed in a way that is not read"),
        ({".git/a.jsonl": b"{}"}, {}, rf"/x: {JSONL}; put some there"),
        ({"a.jsonl": b"", "a.txt": b"a text"}, {}, r"^data\.train: s3://acme-data/x: not one byte; give files with"),
        ({"": b"", "below/": b""}, {"format": "text"}, r"/x: no file \(format: text\); put some there"),
        ({"deep/er/a.jsonl": b"{}"}, {}, ""),
        ({"x": b"{}"}, {}, ""),  # a file that was copied to x/: a host takes it for x
        ({"": b"", "a.txt": b"a text"}, {"format": "text"}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_without_a_file_of_its_format_is_refused(
    deployed: Account,
    job: JobSpec,
    contract: TenantContract,
    files: dict[str, bytes],
    changes: dict[str, str],
    told: str,
    streaming: bool,
) -> None:
    """Its ranks said so after the queue, the image and the rendezvous, at the price of all of its hosts."""
    content = job.model_dump(mode="json", exclude_none=True)
    data = content["data"] | {"train": [{"path": "tenant://x", "format": "jsonl"} | changes], "streaming": streaming}
    in_folder = {f"x/{name}": body for name, body in files.items()}
    found = refusal(deployed.client("s3"), contract, job, in_folder, data=data)
    assert found == "" if not told else re.search(told, found), found


def test_a_set_is_refused_by_its_name_and_one_of_several_sources_may_be_empty(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    s3 = deployed.client("s3")
    empty, full = (
        {"path": "tenant://empty.jsonl", "format": "jsonl"},
        {"path": "tenant://sets/train", "format": "jsonl"},
    )
    data = job.model_dump(mode="json", exclude_none=True)["data"]
    both = data | {"train": [empty, full]}
    assert refusal(s3, contract, job, {"empty.jsonl": b""}, data=both) == ""
    twice = data | {"train": [{"path": "tenant://x", "format": kind} for kind in ("text", "jsonl")]}
    assert refusal(s3, contract, job, {"x/a.txt": b"a text", "x/a.json": b""}, data=twice) == ""
    named = data | {"validation": [full, empty | {"name": "code"}]}
    assert refusal(s3, contract, job, {}, data=named).startswith(
        "data.validation (code): s3://acme-data/empty.jsonl: not"
    )


def test_of_a_folder_with_many_other_files_nothing_is_said(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = job.model_dump(mode="json", exclude_none=True)["data"] | {
        "train": [{"path": "tenant://x", "format": "jsonl"}]
    }
    s3, honest, asked = deployed.client("s3"), s3_inputs._listed, []

    def slowly(*given: Any, **more: Any) -> Any:
        for page in honest(*given, **more):
            for item in page:
                asked.append(item)
                yield [item]

    monkeypatch.setattr(s3_inputs, "_listed", slowly)
    files = {f"x/{number:02}.txt": b"a text" for number in range(30)}
    assert refusal(s3, contract, job, files, data=data) == ""
    assert len(asked) < 30
    monkeypatch.setattr(s3_inputs, "_MOST_PAGES", 30)
    assert "no file that ends in .jsonl" in refusal(s3, contract, job, {}, data=data)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (model(), ""),
        (model(config=None), r"no config\.json there; give a Hugging Face model directory$"),
        (model(index=None), r"has no weights, neither model\.safetensors nor model\.safetensors\.index\.json nor py"),
        (model(second=None), r"model-00002-of-00002\.safetensors: is not there, which model\.safetensors\.index\.json"),
        (model(first=weights(64)[:-1]), r"model-00001-of-00002\.safetensors: has \d+ bytes, not \d+; copy or download"),
        (model(first=weights(64)[:20]), r"00001-of-00002\.safetensors: has 20 bytes, and its header alone \d+; copy"),
        (model(second=POINTER), r"00002-of-00002\.safetensors: is a pointer of Git LFS, not the file: git lfs pull"),
        (model(first=b""), r"model-00001-of-00002\.safetensors: is no safetensors file; copy or download it again$"),
        (model(index=b'{"weight_map": {"a": "sub/other.safetensors"}}'), ""),  # a folder's folders are not looked into
        (model(index=b"{"), r"model\.safetensors\.index\.json: can't be read"),
        ({"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickled"}, ""),
        ({"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": weights(8)}, ""),
    ],
    ids=[
        "whole",
        "no config",
        "no index",
        "a shard short",
        "cut off",
        "cut in its header",
        "a pointer",
        "empty",
        "in a folder of its own",
        "no JSON",
        "pickled",
        "one file",
    ],
)
def test_a_model_that_did_not_arrive_whole_is_refused(
    deployed: Account, job: JobSpec, contract: TenantContract, files: dict[str, bytes], told: str
) -> None:
    in_folder = {f"models/mine/{name}": body for name, body in files.items()}
    source = {"source": "tenant://models/mine"}
    found = refusal(deployed.client("s3"), contract, job, in_folder, model=source)
    if not told:
        assert found == ""
    else:
        assert re.search(told, found), found
        assert found.startswith("model.source: s3://acme-data/models/mine: ")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer": "tenant://models/mine"}, ""),
        ({"tokenizer": None}, ""),
        ({"tokenizer": "tenant://slip.json", "chat_template": "tenant://slip.json"}, ""),
        (
            {"tokenizer": "tenant://bare"},
            r"^data\.tokenizer s3://acme-data/bare: holds no tokenizer\.json; .* correct the",
        ),
        (
            {"tokenizer": "tenant://pointer"},
            r"^tokenizer s3://acme-data/pointer: is not a tokenizer\.json \(a pointer of",
        ),
        (
            {"tokenizer": "tenant://bare/a.txt"},
            r"^tokenizer s3://.*/bare/a\.txt: is not a tokenizer\.json \(no JSON obj",
        ),
        (
            {"chat_template": "tenant://bare"},
            r"^data\.chat_template: s3://acme-data/bare: is a folder; name the file in",
        ),
    ],
    ids=str,
)
def test_a_tokenizer_and_a_template_are_what_they_are_named_for(
    deployed: Account, job: JobSpec, contract: TenantContract, changes: dict[str, Any], told: str
) -> None:
    files = {f"models/mine/{name}": body for name, body in model().items()}
    files |= {"bare/a.txt": b"a text", "pointer": POINTER, "slip.json/slip.json": b'{"model": {}}'}
    data = job.model_dump(mode="json", exclude_none=True)["data"] | changes
    data = {name: value for name, value in data.items() if value is not None}
    found = refusal(
        deployed.client("s3"), contract, job, files, data=data, model={"source": "s3://acme-data/models/mine"}
    )
    assert found == "" if not told else re.search(told, found), found


def test_a_models_folder_without_a_tokenizer_serves_ready_made_ids_alone(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    s3, source = deployed.client("s3"), {"source": "tenant://models/mine"}
    files = {f"models/mine/{name}": body for name, body in model(tokenizer=None).items()} | {"ids.npy": b"ids"}
    data = job.model_dump(mode="json", exclude_none=True)["data"]
    del data["tokenizer"]
    found = refusal(s3, contract, job, files, data=data, model=source)
    assert found.startswith("model.source s3://acme-data/models/mine: holds no tokenizer.json; save the tokenizer")
    ids = data | {"train": [{"path": "tenant://ids.npy", "format": "tokens"}], "validation": []}
    assert refusal(s3, contract, job, {}, data=ids, model=source) == ""
    found = refusal(s3, contract, job, {}, model={"source": "tenant://models/mine/config.json"})
    assert found.startswith("model.source: s3://acme-data/models/mine/config.json: is a file; name the folder")


def test_what_the_launcher_may_not_read_is_left_to_the_job(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, source = deployed.client("s3"), {"source": "tenant://models/mine"}
    files = {f"models/mine/{name}": body for name, body in model(second=b"").items()}

    def answers(code: str, status: int) -> Callable[..., Any]:
        def refuses(**_: Any) -> Any:
            told: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise s3.exceptions.ClientError(told, "GetObject")

        return refuses

    monkeypatch.setattr(s3, "get_object", answers("AccessDenied", 403))
    assert refusal(s3, contract, job, files, model=source) == ""
    monkeypatch.setattr(s3, "get_object", answers("NoSuchKey", 404))  # it went since it was listed
    assert refusal(s3, contract, job, {}, model=source) == ""
    assert refusal(s3, contract, job, {}) == ""
    monkeypatch.setattr(s3, "get_object", answers("InternalError", 500))
    with pytest.raises(AwsAwayError, match=r"^reading s3://acme-data/models/mine/.*: AWS refused: InternalError: no"):
        refusal(s3, contract, job, {}, model=source)


def test_a_list_that_the_launcher_may_not_see_is_left_to_the_job_and_a_file_has_no_neighbours_listed(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, prefixes = deployed.client("s3"), []
    honest = s3.get_paginator("list_objects_v2")

    class Denied:
        def paginate(self, **asked: Any) -> Any:
            prefixes.append(asked["Prefix"])
            if asked["Prefix"] in refused:
                told: Any = {"Error": {"Code": "AccessDenied", "Message": "no"}}
                raise s3.exceptions.ClientError(told, "ListObjectsV2")
            return honest.paginate(**asked)

    monkeypatch.setattr(s3, "get_paginator", lambda _: Denied())
    refused: set[str] = set()
    assert refusal(s3, contract, job, {"sets/train/part-0.jsonl": b"{}"}) == ""
    assert "sets/" not in prefixes, "a tokenizer's folder may hold a million shards"
    refused = {"models/mine/", "sets/train/", "sets/tokenizer.json"}
    files = {f"models/mine/{name}": body for name, body in model(config=None).items()} | {
        "sets/train/part-0.jsonl": b""
    }
    assert refusal(s3, contract, job, files, model={"source": "tenant://models/mine"}) == ""
