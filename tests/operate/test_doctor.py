"""The doctor: what is wrong is found and comes with its mend; what must be denied and isn't, fails."""

from pathlib import Path

import pytest
from launch_testing import IMAGE

from trainyard.cli.app import run
from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.contract import how_to_deploy, read_contract
from trainyard.launch.session import Account
from trainyard.operate import doctor
from trainyard.operate.account_checks import Check, failed
from trainyard.operate.doctor import examine
from trainyard.spec.platform import EnvironmentSpec, TenantContract


@pytest.fixture(autouse=True)
def without_account_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have tests of their own, and moto knows half of what they ask."""
    for name in ("of_environment", "of_tenant"):
        monkeypatch.setattr(doctor, name, lambda *_: iter(()))


def by_name(environment: EnvironmentSpec, tenant: str | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine(environment, tenant)}


def test_an_empty_account_fails_with_a_mend_on_every_line(aws: Account, environment: EnvironmentSpec) -> None:
    checks = by_name(environment)
    assert checks["account"].level == "pass"
    for name in ("stacks", "image", "acme: contract", "globex: contract"):
        assert (checks[name].level, bool(checks[name].mend)) == ("fail", True), name
    assert "trainyard-test-acme-foundation (not deployed)" in checks["stacks"].finding


def test_the_mend_of_what_is_not_deployed_is_whole(aws: Account, environment: EnvironmentSpec) -> None:
    """A refusal's last part is its mend, which has to be one: half of it told to deploy another file."""
    for name, told in (
        ("local", "scripts/quickstart"),
        ("production", "environments/production.yaml"),
        ("mine", "ENV"),
    ):
        spec = environment.model_copy(update={"name": name, "emulated": name == "local"})
        with pytest.raises(AwsRefusedError) as refused:
            read_contract(aws, spec, "acme")
        mend = failed("acme: contract", refused.value).mend
        assert mend == how_to_deploy(spec) and mend.startswith("deploy the stacks: ") and told in mend
        assert name == "production" or "trainyard deploy ENV.yaml" in mend, "a file of one's own has any name"


def test_a_refusal_in_any_services_words_is_a_denial() -> None:
    from botocore.exceptions import ClientError

    def refused(code: str) -> Check:
        def attempt() -> None:
            raise ClientError({"Error": {"Code": code, "Message": "no"}}, "Operation")

        return doctor._denied("acme: denied globex's network", attempt)

    assert refused("UnauthorizedOperation").level == "pass", "EC2's word for it"
    assert refused("Throttling").level == "fail"


def test_without_credentials_the_rest_is_left_out(
    environment: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    checks = by_name(environment)
    assert checks["account"].level == "fail" and "aws sso login" in checks["account"].mend
    assert "stacks" not in checks and "python" in checks


def test_a_deployed_tenant_passes_and_what_is_allowed_to_all_fails(
    deployed: Account, contract: TenantContract, environment: EnvironmentSpec
) -> None:
    other = contract.model_copy(
        update={"tenant": "globex", "buckets": contract.buckets.model_copy(update={"data": "globex-data"})}
    )
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/globex/contract", Value=other.model_dump_json(), Type="String"
    )
    deployed.client("s3").create_bucket(Bucket="globex-data")
    checks = by_name(environment, "acme")
    assert checks["image"].finding == IMAGE
    assert checks["acme: data bucket"].level == "pass"
    # moto judges no policy, so acme reads globex's bucket: exactly what the doctor must not pass over.
    assert checks["acme: denied globex's data bucket"].level == "fail"
    assert "was ALLOWED" in checks["acme: denied globex's data bucket"].finding
    assert not any(name.startswith("globex:") for name in checks), "only the tenant that was asked for"


def test_of_one_tenant_no_others_stacks_are_missed(aws: Account, environment: EnvironmentSpec) -> None:
    cloudformation = aws.client("cloudformation")
    assert set(environment.tenants) == {"acme", "globex"}
    for part in ("platform", "acme-foundation"):
        body = '{"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}'
        cloudformation.create_stack(StackName=f"trainyard-test-{part}", TemplateBody=body)
    assert by_name(environment, "acme")["stacks"].finding == "trainyard-test-acme-training (not deployed)"
    cloudformation.create_stack(StackName="trainyard-test-acme-training", TemplateBody=body)
    check = by_name(environment, "acme")["stacks"]
    assert (check.level, check.finding) == ("pass", "3 deployed"), "whoever was onboarded is told of itself"
    assert "globex-foundation (not deployed)" in by_name(environment)["stacks"].finding


def test_a_missing_bucket_is_no_denial(
    deployed: Account, contract: TenantContract, environment: EnvironmentSpec
) -> None:
    gone = contract.model_copy(
        update={"tenant": "globex", "buckets": contract.buckets.model_copy(update={"data": "gone-bucket"})}
    )
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/globex/contract", Value=gone.model_dump_json(), Type="String"
    )
    check = by_name(environment, "acme")["acme: denied globex's data bucket"]
    assert check.level == "fail" and "NoSuchBucket, which is no denial" in check.finding


def test_a_broker_that_cannot_be_called_fails(
    deployed: Account, contract: TenantContract, environment: EnvironmentSpec
) -> None:
    for tenant in ("acme", "globex"):
        told = contract.model_copy(update={"tenant": tenant, "broker": f"trainyard-test-{tenant}-broker"})
        name = f"/trainyard/test/{tenant}/contract"
        deployed.client("ssm").put_parameter(Name=name, Value=told.model_dump_json(), Type="String", Overwrite=True)
    checks = by_name(environment, "acme")
    assert checks["acme: broker"].level == "fail" and "ResourceNotFound" in checks["acme: broker"].finding
    assert checks["acme: broker"].mend
    assert "which is no denial" in checks["acme: denied globex's broker"].finding


def test_an_unknown_tenant_is_named_at_once(environment: EnvironmentSpec) -> None:
    with pytest.raises(InputError, match="'initech' is not in environment test"):
        next(examine(environment, "initech"))


def test_old_and_missing_prices_are_warnings(environment: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_PRICE_AGE_DAYS", -1)
    old = doctor.prices(environment)
    assert (old.level, "days old" in old.finding) == ("warn", True)
    monkeypatch.setattr(doctor, "MAX_PRICE_AGE_DAYS", 100_000)
    assert doctor.prices(environment).level == "pass"
    unpriced = environment.model_copy(update={"max_instances": {"ml.none.large": 1}})
    assert doctor.prices(unpriced).level == "warn"
    monkeypatch.setitem(doctor.MAX_AGE_DAYS, "on_demand", -1)
    refused = doctor.prices(environment)
    assert (refused.level, refused.mend) == ("fail", "trainyard prices refresh"), "no plan quotes it"


def test_a_cdk_that_is_not_the_pinned_one_fails(tmp_path: Path) -> None:
    (tmp_path / "node_modules" / "aws-cdk").mkdir(parents=True)
    (tmp_path / "node_modules" / "aws-cdk" / "package.json").write_text('{"version": "3.0.0"}')
    (tmp_path / "package.json").write_text('{"devDependencies": {"aws-cdk": "2.1148.1"}}')
    check = doctor._cdk(tmp_path)
    assert check.level == "fail" and "3.0.0 is installed, 2.1148.1 is pinned" in check.finding
    assert doctor._cdk(tmp_path / "elsewhere").level == "fail"


def test_the_verb_ends_with_1_where_something_fails(
    aws: Account, environment_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "-e", str(environment_path)]) == 1
    out = capsys.readouterr().out
    assert "fail stacks" in out and "mend: deploy the stacks: trainyard deploy" in out
