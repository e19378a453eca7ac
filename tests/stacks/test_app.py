"""app.py as the CDK CLI runs it, the refusals before synthesis, and where the process environment may be read."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from stacks.preflight import check_environment
from trainyard.errors import InputError
from trainyard.spec.platform import EnvironmentSpec

ROOT = Path(__file__).parents[2]


SUFFIX = ".template.json"


def _made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "out").glob(f"*{SUFFIX}"))


def _run_app(context: dict[str, str], tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """As the CDK CLI starts it: the context of cdk.json and of the command line in one variable."""
    whole = json.loads((ROOT / "cdk.json").read_text())["context"] | context
    environment = {"CDK_CONTEXT_JSON": json.dumps(whole), "CDK_OUTDIR": str(tmp_path / "out"), "HOME": str(tmp_path)}
    # In a new home it would unpack its 210 MB of JavaScript again, for half a minute.
    environment["JSII_RUNTIME_PACKAGE_CACHE_ROOT"] = str(Path.home() / ".cache/aws/jsii/package-cache")
    if context.get("checks") == "off":
        environment["CDK_VALIDATION"] = "false"
    # No node on PATH: app.py must find the one of the virtual environment.
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py")],
        cwd=ROOT,
        env={**environment, "PATH": os.defpath, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_same_templates_from_any_place_without_credentials_home_or_node_by_one_process_or_two(
    tmp_path: Path, templates: dict[str, Any], assemblies: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes((ROOT / "environments" / "local.yaml").read_bytes())
    # The checks have passed where `templates` were made, and the next test but one has them as here.
    done = _run_app({"environment": str(path), "checks": "off", "processes": "2"}, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    made = {item.name.removesuffix(SUFFIX): json.loads(item.read_text()) for item in _made(tmp_path)}
    assert made == templates["local"]
    # What the CDK's command goes by: every stack with its dependencies, and every asset that is to be uploaded.
    whole, joined = assemblies / "local", tmp_path / "out"
    artifacts = [json.loads((folder / "manifest.json").read_text())["artifacts"] for folder in (whole, joined)]
    kept = [{name: item.get("dependencies") for name, item in each.items()} for each in artifacts]
    assert kept[0] == kept[1]
    assert {item.name for item in whole.iterdir()} - {"validation-report.json"} == {
        item.name for item in joined.iterdir()
    }
    trees = [json.loads((folder / "tree.json").read_text())["tree"]["children"] for folder in (whole, joined)]
    assert set(trees[0]) == set(trees[1])


@pytest.mark.parametrize(
    ("context", "fragments"),
    [
        ({}, ["-c environment=PATH"]),
        ({"environment": "environments/local.yaml", "processes": "two"}, ["-c processes=two: a whole number"]),
        # The same way out; what is said of files is told by the tests of the spec.
        pytest.param({"environment": "/nowhere.yaml"}, ["/nowhere.yaml: no such file"], marks=pytest.mark.full),
    ],
)
def test_a_wrong_environment_is_one_line_and_exit_code_2(
    context: dict[str, str], fragments: list[str], tmp_path: Path
) -> None:
    """And at once: importing the CDK, which starts its own process, takes seconds."""
    (tmp_path / "aws_cdk.py").write_text("raise RuntimeError('the CDK was started')")
    done = _run_app(context, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert all(fragment in done.stderr for fragment in fragments)
    assert _made(tmp_path) == []


@pytest.mark.slow
def test_what_is_wrong_in_another_processs_part_is_one_line_too(tmp_path: Path) -> None:
    """A boundary that IAM would not take shows only where the tenant is made: here in the second of two processes."""
    content = yaml.safe_load((ROOT / "environments" / "local.yaml").read_text())
    plan = {"instance_type": "ml.p5.4xlarge", "max_instances": 1}
    content["tenants"]["globex"]["training_plans"] = {f"plan-{number}": plan for number in range(40)}
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(content))
    done = _run_app({"environment": str(path), "checks": "off", "processes": "2"}, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert _made(tmp_path) == [] and not (tmp_path / "out" / "manifest.json").exists()
    assert (
        "tenants.globex: with 1 instance type and 40 training plans the tenant's permissions boundary would have"
        in done.stderr
    )


@pytest.fixture(scope="module")
def app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainyard_app", ROOT / "app.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _part(folder: Path, code: int, said: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that ends so, and the assembly that it left."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"artifacts": {folder.name: {}}}))
    program = f"import sys; sys.stderr.write({said!r}); sys.exit({code})"
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True), folder


@pytest.mark.parametrize("codes", [(0, 0), (0, 2), (2, 0)])
def test_what_a_check_finds_in_another_processs_part_fails_the_whole_and_is_told(
    codes: tuple[int, int], app: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"see {tmp_path}/part0/validation-report.json\n"
    parts = [_part(tmp_path / f"part{number}", code, said) for number, code in enumerate(codes)]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert app._joined(whole, *map(list, zip(*parts, strict=True))) == (2 in codes)
    assert set(json.loads((whole / "manifest.json").read_text())["artifacts"]) == {"part0", "part1"}
    assert capsys.readouterr().err.startswith(f"see {whole}/validation-report.json\n")


@pytest.mark.parametrize(("code", "error"), [(1, RuntimeError), (2, InputError)])
def test_where_another_process_fails_no_assembly_is_left(
    code: int, error: type[Exception], app: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = _part(tmp_path / "good", 0, "")
    bad = _part(tmp_path / "bad", code, "a warning\nwhat is wrong\n")
    (bad[1] / "manifest.json").unlink()
    whole = tmp_path / "whole"
    whole.mkdir()
    with pytest.raises(error, match="what is wrong"):
        app._joined(whole, [good[0], bad[0]], [good[1], bad[1]])
    assert not (whole / "manifest.json").exists()
    assert capsys.readouterr().err == ("a warning\n" if code == 2 else "")


def test_another_process_is_ended_with_all_that_it_started(app: ModuleType, tmp_path: Path) -> None:
    """It leads its own group: the node of its jsii would go on writing into a folder that is being removed."""
    process = app._start({}, ["acme"], tmp_path)
    try:
        assert os.getpgid(process.pid) == process.pid
    finally:
        app.end_group(process)
        process.communicate()


def test_a_part_is_told_by_no_name_that_somebody_could_type(app: ModuleType) -> None:
    assert app._parts({"tenants": "acme", "processes": "2"}, ["acme", "globex"]) == [["acme"], ["globex"]]
    assert app._parts({app.PART: "globex"}, ["acme", "globex"]) == [["globex"]]
    with pytest.raises(InputError, match="-c processes=0: a whole number of processes, 1 or more"):
        app._parts({"processes": 0}, ["acme"])


@pytest.mark.slow
def test_a_region_without_a_resource_type_is_refused_at_synthesis(tmp_path: Path) -> None:
    path = tmp_path / "far.yaml"
    path.write_text((ROOT / "environments" / "local.yaml").read_text().replace("us-east-1", "ap-southeast-5"))
    done = _run_app({"environment": str(path)}, tmp_path)
    assert done.returncode == 2
    assert "AWS::Budgets::Budget' does not exist in 'ap-southeast-5'" in done.stderr
    # The CDK's own report comes through another process, before or after ours.
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(f"{path}: the templates break checks: ")]
    assert "AWS::Budgets::Budget' does not exist" in line and "validation-report.json" in line


def _changed(environments: dict[str, Any], change: dict[str, Any]) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate({**environments["local"].model_dump(mode="json"), **change})


def _tenants(environments: dict[str, Any], queue: dict[str, Any], **names: int) -> dict[str, Any]:
    tenant = environments["local"].model_dump(mode="json")["tenants"]["acme"]
    return {name: {**tenant, "network_index": index, "queues": {"gpu": queue}} for name, index in names.items()}


def test_a_multi_node_queue_of_a_type_without_efa_is_refused(environments: dict[str, Any]) -> None:
    queue = {"instance_types": ["ml.g6e.xlarge"], "max_instances": 2}
    change = {"max_instances": {"ml.g6e.xlarge": 2}, "tenants": _tenants(environments, queue, acme=0)}
    with pytest.raises(InputError, match=r"tenants\.acme\.queues\.gpu: ml\.g6e\.xlarge has no EFA.*multi_node: false"):
        check_environment(_changed(environments, change))
    queue["multi_node"] = False
    check_environment(_changed(environments, {**change, "tenants": _tenants(environments, queue, acme=0)}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("p5.4xlarge", "write ml.p5.4xlarge"), ("ml.p5.5xlarge", "unknown instance type.*ml.p5.48xlarge")],
)
def test_a_type_that_sagemaker_does_not_know_is_refused(environments: dict[str, Any], kind: str, message: str) -> None:
    queue = {"instance_types": [kind], "max_instances": 1}
    change = {"max_instances": {kind: 1}, "tenants": _tenants(environments, queue, acme=0)}
    with pytest.raises(InputError, match=rf"tenants\.acme\.queues\.gpu: .*{message}"):
        check_environment(_changed(environments, change))


def test_a_tenant_whose_name_begins_anothers_is_refused(environments: dict[str, Any]) -> None:
    """`training-job/acme-*` would match the jobs of acme-labs."""
    queue = {"instance_types": ["ml.p5.4xlarge"], "max_instances": 1}
    names = {"acme": 0, "acme-labs": 1}
    with pytest.raises(ValueError, match="tenants acme and acme-labs"):
        _changed(environments, {"tenants": _tenants(environments, queue, **names)})
    check_environment(_changed(environments, {"tenants": _tenants(environments, queue, acme=0, acmelabs=1)}))


@pytest.mark.parametrize(("prefix", "zones"), [(16, 1), (24, 6)])
def test_small_and_large_networks_synthesize(
    synthesize: Any, environments: dict[str, Any], zones: int, prefix: int
) -> None:
    network = {"cidr": "10.64.0.0/10", "vpc_prefix_length": prefix}
    names = [f"us-east-1{letter}" for letter in "abcdef"[:zones]]
    queue = {"instance_types": ["ml.p5.4xlarge"], "max_instances": 1}
    tenants = _tenants(environments, queue, acme=3)
    made = synthesize(_changed(environments, {"availability_zones": names, "network": network, "tenants": tenants}))
    resources = made["trainyard-local-acme-foundation"]["Resources"].values()
    subnets = [item["Properties"] for item in resources if item["Type"] == "AWS::EC2::Subnet"]
    assert sorted(subnet["AvailabilityZone"] for subnet in subnets) == sorted(["us-east-1a", *names])


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1"])
def test_regions_of_other_partitions_are_refused(environments: dict[str, Any], region: str) -> None:
    with pytest.raises(InputError, match=f"region {region} is in a partition of its own"):
        check_environment(_changed(environments, {"region": region, "availability_zones": [f"{region}a"]}))


def test_a_region_that_is_none_is_refused(environments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="region us-wset-2 is none that the CDK knows; close to it: us-west-2"):
        check_environment(_changed(environments, {"region": "us-wset-2", "availability_zones": ["us-wset-2a"]}))


def test_more_zones_than_a_network_has_endpoint_subnets_for_are_refused(environments: dict[str, Any]) -> None:
    changes = {
        "availability_zones": [f"us-east-1{letter}" for letter in "abcdefghi"],
        "network": {"cidr": "10.64.0.0/16", "vpc_prefix_length": 24},
    }
    with pytest.raises(InputError, match="names 9 zones, and a tenant's /24 has endpoint subnets for 8; name fewer"):
        check_environment(_changed(environments, changes))
    changes["availability_zones"] = changes["availability_zones"][:8]
    check_environment(_changed(environments, changes))


def test_a_local_zone_may_hold_training_and_gets_no_endpoint(synthesize: Any, environments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="names Local Zones alone, which take no endpoints"):
        check_environment(_changed(environments, {"availability_zones": ["us-east-1-dfw-2a"]}))
    zones = ["us-east-1-dfw-2a", "us-east-1b"]
    tenants = {"acme": environments["local"].model_dump(mode="json")["tenants"]["acme"]}
    made = synthesize(_changed(environments, {"availability_zones": zones, "tenants": tenants}))
    found = made["trainyard-local-acme-foundation"]["Resources"]
    where = {
        name: item["Properties"]["AvailabilityZone"]
        for name, item in found.items()
        if item["Type"].endswith("::Subnet")
    }
    assert sorted(where.values()) == zones
    used = [
        subnet["Ref"]
        for item in found.values()
        if item["Type"] == "AWS::EC2::VPCEndpoint"
        for subnet in item["Properties"].get("SubnetIds", [])
    ]
    assert used and {where[name] for name in used} == {"us-east-1b"}


def test_a_zone_named_twice_is_refused(environments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="us-east-1a twice"):
        check_environment(_changed(environments, {"availability_zones": ["us-east-1a", "us-east-1a"]}))


@pytest.mark.parametrize(
    ("notify", "message"),
    [
        (["nobody"], "nobody: not an e-mail address"),
        (["a@example.com", "a@example.com"], "2 addresses, 1 of them different"),
    ],
)
def test_addresses_that_aws_would_refuse_are_refused_here(
    environments: dict[str, Any], notify: list[str], message: str
) -> None:
    content = environments["local"].model_dump(mode="json")
    content["tenants"]["acme"]["budget"]["notify"] = notify
    with pytest.raises(InputError, match=rf"tenants\.acme\.budget\.notify: {message}"):
        check_environment(EnvironmentSpec.model_validate(content))


def test_nothing_below_app_reads_the_process_environment() -> None:
    readers = []
    for path in sorted((ROOT / "stacks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            imported = isinstance(node, ast.Import) and any(alias.name == "os" for alias in node.names)
            if imported or name in {"environ", "getenv"}:
                readers.append(f"{path.name}:{getattr(node, 'lineno', 0)}")
    assert readers == []


def test_no_account_region_or_secret_is_in_the_code() -> None:
    """They come from the environment file alone; what the code names are AWS's services."""
    region = r"\b(us|eu|ap|ca|sa|me|af|il|mx)-(gov-)?(north|south|east|west|central)+-\d\b"
    patterns = {"account": r"\b\d{12}\b", "region": region, "access key": r"\b(AKIA|ASIA)[A-Z0-9]{12,}\b"}
    patterns["secret"] = r"(?i)(password|secret_?access_?key|api_?key)\s*=\s*[\"'][^\"']+[\"']"
    files = [ROOT / "app.py", ROOT / "cdk.json", *(ROOT / "stacks").rglob("*.py"), *(ROOT / "stacks").rglob("*.guard")]
    assert len(files) > 20
    assert re.search(region, "us-east-1") and re.search(region, "ap-southeast-2")
    found = [
        f"{path.name}: {kind} {match[0]}"
        for path in files
        for kind, pattern in patterns.items()
        for match in re.finditer(pattern, path.read_text())
    ]
    # CloudTrail, IAM and STS log there whatever the region is.
    assert [item for item in found if "audit.py: region us-east-1" not in item] == []


def test_stack_modules_compose_constructs_and_make_no_raw_resources() -> None:
    """Constructs model, stacks deploy."""
    raw = []
    for path in sorted((ROOT / "stacks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("Cfn"):
                raw.append(f"{path.name}: {node.attr}")
    assert raw == []
