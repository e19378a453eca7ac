"""Bad input gets one line: what is wrong, where, what is allowed, how to mend it."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.errors import InputError
from trainyard.spec.base import apply_overrides, as_override_value
from trainyard.spec.job import JobSpec, load_job
from trainyard.spec.platform import load_environment, parse_contract

JOB: dict[str, Any] = {
    "name": "tiny",
    "model": {"config": {"model_type": "llama"}},
    "data": {"train": [{"path": "text", "format": "text"}]},
    "training": {"steps": 3, "global_batch_size": 4, "learning_rate": 1e-3},
}
ENVIRONMENT: dict[str, Any] = {
    "name": "test",
    "account": "111122223333",
    "region": "us-east-1",
    "availability_zones": ["us-east-1a"],
    "max_instances": {"ml.p5.4xlarge": 4},
    "tenants": {
        name: {
            "network_index": index,
            "queues": {"train": {"instance_types": ["ml.p5.4xlarge"], "max_instances": 2}},
            "budget": {"monthly_usd": 100, "notify": ["team@example.com"]},
        }
        for index, name in enumerate(("acme", "globex"))
    },
}


def changed(content: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(content)
    target: Any = result
    *parents, key = dotted.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[key] = value
    return result


def refusal(load: Any, content: dict[str, Any], folder: Path) -> str:
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", "b5-adamw_8bit", ["name: must be 1 to 40 small letters, digits and dashes", "'b5-adamw_8bit'"]),
        ("training.stepz", 3, ["training.stepz", "unknown key", "did you mean 'steps'?"]),
        ("training.steps", "many", ["training.steps", "integer", "'many'"]),
        ("training.steps", True, ["training.steps", "integer", "'true'"]),
        ("training.learning_rate", False, ["training.learning_rate", "number", "'false'"]),
        ("training.micro_batch_size", True, ["training.micro_batch_size", "integer", "'true'"]),
        ("training.optimizer", {"betas": [False, 0.9]}, ["training.optimizer.betas.0", "number", "'false'"]),
        ("training.seed", 2**63, ["training.seed", "less than 9223372036854775808"]),
        ("recovery.start_minutes", 1e30, ["recovery.start_minutes", "1440"]),
        ("recovery.arrival_seconds", 1e30, ["recovery.arrival_seconds", "86400"]),
        ("parallelism", {"zero": {"overlap": {}}}, ["parallelism.zero.overlap: input should be a valid boolean"]),
        ("training.tokens", 3, ["exactly one of steps, tokens and epochs", "steps, tokens"]),
        ("training.micro_batch_size", "big", ["training.micro_batch_size", "'big'"]),
        ("training.optimizer", {"kind": "adam"}, ["training.optimizer.kind", "'adamw'", "'adam'"]),
        ("training.optimizer", {"kind": "sgd", "momentum": 0, "nesterov": True}, ["nesterov", "momentum above 0"]),
        ("images", {"size": 32}, ["images belongs to task: image_classification"]),
        ("images", {"crop_area": [0.5, 0.1]}, ["crop_area 0.5, 0.1", "0 < from <= to <= 1"]),
        ("images", {"std": [0.2, 0, 0.2]}, ["std is divided by", "above 0"]),
        ("task", "image_classification", ["data.train.0.format", "reads webdataset", "given: text"]),
        (
            "compute",
            {"backend": "sagemaker", "instance_type": "p5.4xlarge"},
            ["compute: instance_type p5.4xlarge: SageMaker's begin with 'ml.'; write ml.p5.4xlarge"],
        ),
        ("parallelism", {"zero_stage": 2}, ["zero_stage belongs to engine: deepspeed", "data_shard"]),
        ("parallelism", {"engine": "deepspeed", "data_shard": 2}, ["data_shard belongs to engine: torch"]),
        ("parallelism", {"zero_stag": 2}, ["parallelism.zero_stag", "did you mean 'zero_stage'?"]),
        ("parallelism", {"data_shard": 4, "expert": 3}, ["expert (3) must divide", "(4)"]),
        ("parallelism", "automatic", ["parallelism", "'automatic'"]),
        ("model.source", "s3://bucket/model", ["exactly one of source", "config"]),
        ("checkpoint", {"destination": "s3:/b/x"}, ["destination: must be an s3://BUCKET/PREFIX or a", "s3:/b/x"]),
        (
            "checkpoint",
            {"destination": "~/kept"},
            ["checkpoint.destination: only a shell takes ~ for", "path (given: ~/kept"],
        ),
        ("checkpoint", {"local_directory": "~"}, ["checkpoint.local_directory: only a shell takes ~ for a home"]),
        ("checkpoint", {"destination": "s3:///"}, ["destination: must be an s3://BUCKET/PREFIX or a folder"]),
        ("data.train", [], ["data.train", "at least 1"]),
        ("model.adapter", {"kind": "lora", "targets": []}, ["model.adapter.targets", "at least 1"]),
        ("data.train", [{"path": "x", "formt": "text"}], ["data.train.0.formt", "did you mean 'format'?"]),
        ("compute", {"backend": "sagemaker"}, ["compute", "needs instance_type", "ml.p5.48xlarge"]),
        ("compute", {"backend": "sagemaker", "instance_type": "p5.48xlarge"}, ["ml.p5.48xlarge"]),
        ("name", "My Job", ["name", "'My Job'"]),
        ("version", 9, ["version", "upgrade"]),
        ("name", False, ["name: input should be a valid string; write it in quotes: YAML takes no, off"]),
        ("checkpoint.every_steps", "autoo", ["checkpoint.every_steps: input should be auto or a valid integer"]),
        ("parallelism", "data", ["parallelism: input should be auto or a mapping of settings"]),
    ],
)
def test_wrong_job(field: str, value: Any, words: list[str], tmp_path: Path) -> None:
    message = refusal(load_job, changed(JOB, field, value), tmp_path)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tenants.globex.network_index", 0, ["tenants.globex.network_index 0 is acme's already", "overlap"]),
        ("tenants.globex.network_index", 5000, ["5000", "only 1,024 blocks", "0 to 1023"]),
        ("tenants.acme.queues.train.max_instances", 9, ["tenants.acme.queues.train", "9", "4 ml.p5.4xlarge"]),
        ("tenants.acme.queues.train.instance_types", ["ml.p6.large"], ["ml.p6.large", "max_instances"]),
        ("tenants.acme.bugdet", {}, ["tenants.acme.bugdet", "did you mean 'budget'?"]),
        ("account", 111122223333, ["account", "string", "write it in quotes"]),
        ("account", "1111-2222-3333", ["account", "twelve digits"]),
        ("region", "mars", ["region", "'mars'", "e.g. us-east-1"]),
        ("name", "a-b", ["name", "no dash", "environment a with tenant b-c", "take ab"]),
        ("availability_zones", ["eu-west-1a"], ["eu-west-1a", "us-east-1"]),
        ("availability_zones", ["us-east-1"], ["us-east-1 are not in region us-east-1", "us-east-1a"]),
        ("availability_zones", "us-east-1a", ["availability_zones", "a list, e.g. [us-east-1a]"]),
        ("network", {"cidr": "8.8.0.0/10"}, ["cidr"]),
        ("network", {"cidr": "127.0.0.0/8"}, ["cidr 127.0.0.0/8", "10/8"]),
        ("network", {"cidr": "169.254.0.0/16"}, ["cidr 169.254.0.0/16", "10/8"]),
        ("max_instances", {"ml.p5.4xlarge": True}, ["max_instances.ml.p5.4xlarge", "integer", "'true'"]),
        ("max_instances", {"ml.p5.4xlarge": 0}, ["max_instances.ml.p5.4xlarge", "greater than 0"]),
        (
            "tenants.Vision",
            ENVIRONMENT["tenants"]["acme"],
            ["tenants: the name must be 2 to 20 small letters", "'Vision'"],
        ),
        ("tenants.globex", None, ["tenants.globex", "a mapping of settings"]),
        ("tenants", {}, ["tenants: mapping should have at least 1 item, has none"]),
        ("tenants.acme.queues.train.instance_types", ["p5.4xlarge"], ["did you mean ml.p5.4xlarge?"]),
        ("tenants.acme.queues.train.instance_types", ["ml.p5.4xlarge"] * 2, ["ml.p5.4xlarge: stands twice"]),
        ("tenants.acme.cost_center", "x" * 257, ["cost_center", "256"]),
        ("tenants.acme.cost_center", "<4711>", ["cost_center: must be what a tag's value can hold", "'<4711>'"]),
        ("tenants.acme.file_system", {"storage_gib": 3000}, ["storage_gib", "multiple of 2400", "3000"]),
        ("tenants.acme.file_system", {"efa": True}, ["efa: storage_gib is then a multiple of 19,200", "not 1,200"]),
        ("tenants.acme.file_system", {"links": {"data": "x"}}, ["'data' is no folder of the file system", "/datasets"]),
        ("tenants.acme.file_system", {"links": {"/a/../b": "x"}}, ["'/a/../b' is no folder"]),
        ("tenants.acme.file_system", {"links": {"/a": "/x"}}, ["links./a: '/x' is no folder of the data bucket"]),
        ("tenants.acme.file_system", {"links": {"/a": "jobs/x"}}, ["jobs/", "can't be linked"]),
        ("tenants.acme.file_system", {"links": {"/a": "x", "/a/b": "y"}}, ["a and a/b", "none inside another"]),
        ("tenants.acme.file_system", {"links": {"/a": "x", "/b": "x"}}, ["x and x", "linked once"]),
        ("tenants.acme.file_system", {"links": {f"/{n}": f"{n}" for n in range(9)}}, ["links", "at most 8"]),
        ("tenants.acme.storage", {"archive_data_after_days": 5}, ["archive_data_after_days", "30", "5"]),
        (
            "tenants.acme.storage",
            {"archive_checkpoints_after_days": 30, "delete_checkpoints_after_days": 60},
            ["delete_checkpoints_after_days 60", "120 or later"],
        ),
        ("tenants.acme.removal", {"export_to": "bucket/x"}, ["removal.export_to: must be s3://bucket", "bucket/x"]),
    ],
)
def test_wrong_environment(field: str, value: Any, words: list[str], tmp_path: Path) -> None:
    message = refusal(load_environment, changed(ENVIRONMENT, field, value), tmp_path)
    assert [word for word in words if word not in message] == []


def test_data_can_not_be_retained_by_stacks_that_delete_it(tmp_path: Path) -> None:
    content = changed(changed(ENVIRONMENT, "retain_data", False), "tenants.acme.removal", {"data": "retain"})
    message = refusal(load_environment, content, tmp_path)
    assert "tenants.acme.removal.data: retain needs the environment's retain_data: true" in message


def test_good_ones_load(tmp_path: Path) -> None:
    for name, content in (("job.yaml", JOB), ("environment.yaml", ENVIRONMENT)):
        (tmp_path / name).write_text(yaml.safe_dump(content))
    assert load_job(tmp_path / "job.yaml", ["training.steps=20", "parallelism.data_shard=2"]).training.steps == 20
    environment = load_environment(tmp_path / "environment.yaml")
    blocks = [environment.network.block(tenant.network_index) for tenant in environment.tenants.values()]
    assert blocks == ["10.64.0.0/20", "10.64.16.0/20"]


def test_a_cost_center_may_have_any_letters_that_a_tag_takes(tmp_path: Path) -> None:
    path = tmp_path / "environment.yaml"
    path.write_text(yaml.safe_dump(changed(ENVIRONMENT, "tenants.acme.cost_center", "Größe-12 研究")))
    assert load_environment(path).tenants["acme"].cost_center == "Größe-12 研究"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\nname: b\n")
    with pytest.raises(InputError, match="line 2: the key 'name' stands twice"):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"name: 2026-13-45\n", r"job\.yaml: is not valid YAML: holds a date or number that is none: month must be"),
        (b"name: " + b"9" * 5000, r"job\.yaml: is not valid YAML: holds a date or number that is none"),
        (b"name: " + b"[" * 3000, r"job\.yaml: is not valid YAML: lists or mappings stand too deep in each other"),
        (b"name: !!bool foo\n", r"job\.yaml: is not valid YAML: holds a value that is not of the type \(!!bool, "),
        (b"name: !!timestamp foo\n", r"job\.yaml: is not valid YAML: holds a value that is not of the type"),
        (b"name: !!int ''\n", r"job\.yaml: is not valid YAML: holds a value that is not of the type"),
        (b"name: !!float ''\n", r"job\.yaml: is not valid YAML: holds a value that is not of the type"),
        (b"name: a\n? [a, b]\n: 1\n", r"job\.yaml: line 2: a key is a list; it must be a setting's name"),
        (b"name: \xff\n", r"job\.yaml: is no text: its byte 7 is not UTF-8; save it as UTF-8"),
    ],
    ids=["date", "number", "depth", "truth", "time", "empty", "sum", "key", "bytes"],
)
def test_what_yaml_reads_into_no_value_is_refused(text: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(text)
    with pytest.raises(InputError, match=told):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("2026-13-45", "holds a date or number that is none: month must be"),
        ("[" * 3000, "lists or mappings stand too deep in each other"),
        ("!!bool foo", r"holds a value that is not of the type \(!!bool, !!int, ...\) stated before it"),
        ("{? [a]: 1}", "line 1: a key is a list; it must be a setting's name"),
        ("{a: 1, a: 2}", "line 1: the key 'a' stands twice; keep one"),
        ("[1", "expected ',' or ']', but got '<stream end>'"),
    ],
    ids=["date", "depth", "type", "key", "twice", "open"],
)
def test_an_override_that_yaml_reads_into_no_value_is_refused_with_the_reason(
    value: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("name: a\n")
    with pytest.raises(InputError, match=rf"^--set training.steps=.* is not a valid YAML value: {why}") as caught:
        load_job(tmp_path / "job.yaml", [f"training.steps={value}"])
    assert "\n" not in str(caught.value)


def test_a_number_may_be_written_as_json_writes_it(tmp_path: Path) -> None:
    """PyYAML reads it as text: a model's configuration, copied from its config.json, ended the job at its start."""
    config = (
        '{"model_type": "llama", "rms_norm_eps": 1e-05, "rope_theta": 1E6, "nested": [{"a": -2.5e+3}], "name": "1e9"}'
    )
    (tmp_path / "job.yaml").write_text(
        f"name: 1e9\nmodel: {{config: {config}}}\ndata: {{train: [{{path: 7e7, format: text}}]}}\n"
        "training: {tokens: 2e9, global_batch_size: 4, learning_rate: 3e-4, optimizer: {betas: [.9, 95e-2]}}\n"
    )
    layout = ["parallelism={engine: deepspeed, deepspeed: {zero_optimization: {sub_group_size: 1e8}}}"]
    job = load_job(tmp_path / "job.yaml", [*layout, "training.validation_every_steps=1e3"])
    assert job.model.config == {
        **{"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "nested": [{"a": -2500.0}]},
        "name": "1e9",
    }
    assert (job.training.tokens, job.training.learning_rate, job.training.optimizer.betas) == (
        2 * 10**9,
        3e-4,
        (0.9, 0.95),
    )
    assert job.training.validation_every_steps == 1000
    assert job.parallelism != "auto" and job.parallelism.deepspeed == {"zero_optimization": {"sub_group_size": 1e8}}
    assert (job.name, job.data.train[0].path) == ("1e9", "7e7"), "text stays text"
    for field, value in (("training.steps", "15e-1"), ("training.steps", "1e999"), ("training.learning_rate", "1e999")):
        with pytest.raises(InputError, match=rf"{field}: input should be a .*\(given: "):
            load_job(tmp_path / "job.yaml", ["training.tokens=null", f"{field}={value}"])


def test_a_number_that_is_too_large_is_refused_where_anything_may_stand(tmp_path: Path) -> None:
    """It became a text, or infinite, in a model's configuration, and the job ended at its start."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    for number in ("2e400", "-2.5e+400"):
        told = rf"number is too large: at most 1\.79e308; write it in quotes .*\(given: {re.escape(number)}\)"
        for field, value in (
            ("model.config.b", f"model={{config: {{model_type: llama, b: {number}}}}}"),
            ("model.config.b.1.c", f"model={{config: {{model_type: llama, b: [1, {{c: {number}}}]}}}}"),
            (
                "parallelism.deepspeed.zero_optimization.sub_group_size",
                f"parallelism={{engine: deepspeed, deepspeed: {{zero_optimization: {{sub_group_size: {number}}}}}}}",
            ),
        ):
            with pytest.raises(InputError, match=rf"job\.yaml: {re.escape(field)}: {told}$"):
                load_job(tmp_path / "job.yaml", [value])
    # Mamba 2 has an infinite limit; and a text is what stands in quotes.
    config = "model={config: {model_type: mamba2, time_step_limit: [0.0, .inf], b: '2e400', c: 1.0e+300}}"
    loaded = load_job(tmp_path / "job.yaml", [config]).model.config
    assert loaded is not None
    assert (loaded["time_step_limit"], loaded["b"], loaded["c"]) == ([0.0, float("inf")], "2e400", 1e300)


def test_two_numbers_and_a_colon_are_no_number_in_base_sixty(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    for field, value in (
        ("compute.max_hours", "2:30"),
        ("training.steps", "1:00"),
        ("recovery.window_minutes", "1:30.5"),
    ):
        with pytest.raises(InputError, match=rf"{field}: .*unable to parse string.* \(given: '{value}'\)"):
            load_job(tmp_path / "job.yaml", [f"{field}={value}"])
    assert load_job(tmp_path / "job.yaml", ["compute.max_hours=2.5", "training.steps=0x10"]).training.steps == 16


def test_an_entry_of_a_list_is_overridden_by_the_name_that_messages_give_it(tmp_path: Path) -> None:
    """The list became a mapping, and what was refused was that it is no list."""
    path = tmp_path / "job.yaml"
    sources = [{"path": name, "format": "text"} for name in ("a", "b")]
    path.write_text(yaml.safe_dump(changed(JOB, "data.train", sources)))
    overrides = ["data.train.1.path=c", "data.train.0.format=jsonl", "training.optimizer.betas=[0.8, 0.9]"]
    job = load_job(path, [*overrides, "training.optimizer.betas.0=0.7"])
    assert [(source.path, source.format) for source in job.data.train] == [("a", "jsonl"), ("c", "text")]
    assert job.training.optimizer.betas == (0.7, 0.9)
    # One setting has one name: no 00, and no digits of another script.
    for part in ("2.", "", "-1.", "00.", "\u0660.", "9" * 5000 + "."):
        with pytest.raises(
            InputError,
            match=rf"^--set data.train.{part}path=c: data\.train is a list and has entries 0 to 1; "
            r"name one, data\.train\.0\.path, or give the whole list, data\.train=\[\.\.\.\]$",
        ):
            load_job(path, [f"data.train.{part}path=c"])
    one = "training.optimizer.betas"
    with pytest.raises(InputError, match=rf"{one} is a list and has one entry, 0; name one, {one}\.0, or"):
        load_job(path, [f"{one}=[0.8]", f"{one}.1=3"])
    with pytest.raises(InputError, match=r"data\.validation is a list and has no entry; give the whole list, "):
        load_job(path, ["data.validation=[]", "data.validation.0=x"])
    with pytest.raises(InputError, match=r"data\.train\.1\.formt: unknown key"):
        load_job(path, ["data.train.1.formt=text"])


def test_a_folder_in_the_files_place_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't be read: Is a directory$"):
        load_job(tmp_path)


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ndata: [1, 2\n")
    with pytest.raises(InputError, match=r"job\.yaml: line \d+ is not valid YAML"):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ("- a", "holds a list"), ("\0", "is not valid YAML: unacceptable character")],
)
def test_a_file_that_is_no_mapping_is_one_line(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        load_environment(tmp_path / "env.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["steps", "=3", "training.steps=[1"])
def test_wrong_override(override: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    with pytest.raises(InputError, match="--set"):
        load_job(tmp_path / "job.yaml", [override])


def test_world_size_is_the_product() -> None:
    spec = JobSpec.model_validate(
        {**JOB, "parallelism": {"data_replicate": 2, "data_shard": 3, "tensor": 2, "context": 2}}
    )
    assert spec.parallelism != "auto"
    assert (spec.parallelism.world_size, spec.parallelism.data_parallel_size) == (24, 6)


def test_a_list_whose_item_is_wrong_is_not_told_to_be_empty_too(tmp_path: Path) -> None:
    """pydantic counts what is left of it."""
    message = refusal(load_job, changed(JOB, "data.train", [{"path": "text", "format": "chat"}]), tmp_path)
    assert message.endswith("or 'webdataset' (given: 'chat')") and "has none" not in message
    assert "data.train: list should have at least 1 item, has none" in refusal(
        load_job, changed(JOB, "data.train", []), tmp_path
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "is no contract but a list"),
        ("null", "is no contract but a NoneType"),
        ('{"version":"9"}', "version: '9' is no whole number"),
        ('{"version":true}', "version: True is no whole number"),
        ('{"version":99}', "contract version 99 is above"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "environment"),
    ],
)
def test_what_is_no_contract_is_one_line(text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_contract(text, "/trainyard/local/acme/contract")
    assert str(caught.value).startswith("/trainyard/local/acme/contract: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("quota", ["monthly_usd", "monthly_gpu_hours"])
def test_a_tenant_is_frozen_by_a_little_money_and_who_writes_none_is_told(tmp_path: Path, quota: str) -> None:
    spent = changed(ENVIRONMENT, f"tenants.acme.budget.{quota}", 0)
    told = refusal(load_environment, spent, tmp_path)
    assert f"budget.{quota}" in told and "monthly_usd: 0.01" in told and "monthly_gpu_hours: 0.01" in told
    path = tmp_path / "frozen.yaml"
    path.write_text(yaml.safe_dump(changed(ENVIRONMENT, f"tenants.acme.budget.{quota}", 0.01)))
    assert getattr(load_environment(path).tenants["acme"].budget, quota) == 0.01


@pytest.mark.parametrize(
    ("value", "quoted"),
    [("/data/run #2", '"/data/run #2"'), ("[1, 2] # both", '"[1, 2] # both"'), ("# none", '"# none"')],
)
def test_what_yaml_takes_for_a_comment_is_not_left_out_of_a_value_in_silence(value: str, quoted: str) -> None:
    """A job saved to /data/run, and went on from what another had saved there."""
    with pytest.raises(InputError) as told:
        apply_overrides({}, [f"checkpoint.destination={value}"])
    assert str(told.value).endswith(f"put the value in quotes: --set 'checkpoint.destination={quoted}'")
    assert "\n" not in str(told.value)
    assert apply_overrides({}, [f"a.b={quoted}"]) == {"a": {"b": value}}


def test_a_comment_in_lines_of_yaml_is_one() -> None:
    assert apply_overrides({}, ["a=[1,\n2]\n# both\n"]) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "text",
    [
        *("/data/run", "/data/run #2", "/a: b", "12", "null", "~", "*a", 'the "x"', "ü", "- a", ""),
        *("/data/\u2028 #x", "\x7f", "a\n # b", "😀 #"),
    ],
)
def test_a_text_comes_through_an_override_as_it_is(text: str) -> None:
    assert apply_overrides({}, [f"a.b={as_override_value(text)}"]) == {"a": {"b": text}}
    assert as_override_value("/data/run 2") == "/data/run 2"
