"""What the registry's operations need, as the authorizer reads them: no name leads past a tenant's policy."""

from typing import Any

import pytest

from trainyard.emulator.authorization.actions import Check, UnmappedError, checks_for
from trainyard.emulator.authorization.requests import AwsRequest

ACCOUNT = "123456789012"
BASE = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}"


def checks(operation: str, **parameters: Any) -> list[Check]:
    request = AwsRequest(
        service="sagemaker",
        operation=operation,
        region="us-east-1",
        access_key_id="ASIAEXAMPLE",
        session_token="",
        method="POST",
        path="/",
        query={},
        headers={},
        protocol="json",
        parameters=parameters,
    )
    return checks_for(request, ACCOUNT, lambda name: name, lambda key: key)


def test_a_group_is_judged_with_its_tags() -> None:
    tags = [{"Key": "trainyard:tenant", "Value": "acme"}]
    made, tagged = checks("CreateModelPackageGroup", ModelPackageGroupName="acme-m", Tags=tags)
    assert (made.action, made.resource) == ("sagemaker:CreateModelPackageGroup", f"{BASE}:model-package-group/acme-m")
    assert (tagged.action, tagged.resource) == ("sagemaker:AddTags", made.resource)
    assert (
        made.context["aws:requesttag/trainyard:tenant"] == tagged.context["aws:requesttag/trainyard:tenant"] == "acme"
    )


def test_a_version_is_judged_by_its_group_and_says_its_approval() -> None:
    (check,) = checks("CreateModelPackage", ModelPackageGroupName="acme-m", ModelApprovalStatus="Approved")
    assert (check.action, check.resource) == ("sagemaker:CreateModelPackage", f"{BASE}:model-package/acme-m/*")
    assert check.context["sagemaker:modelapprovalstatus"] == "Approved"


@pytest.mark.parametrize(
    ("operation", "parameters", "resource"),
    [
        ("ListModelPackages", {"ModelPackageGroupName": "acme-m"}, f"{BASE}:model-package/acme-m/*"),
        ("ListModelPackages", {}, f"{BASE}:model-package/*/*"),  # everybody's: no tenant's pattern meets it
        (
            "DescribeModelPackage",
            {"ModelPackageName": f"{BASE}:model-package/acme-m/1"},
            f"{BASE}:model-package/acme-m/1",
        ),
        ("DescribeModelPackageGroup", {"ModelPackageGroupName": "acme-m"}, f"{BASE}:model-package-group/acme-m"),
        ("UpdateModelPackage", {"ModelPackageArn": f"{BASE}:model-package/acme-m/1"}, f"{BASE}:model-package/acme-m/1"),
    ],
)
def test_each_operation_names_what_it_touches(operation: str, parameters: dict[str, str], resource: str) -> None:
    (check,) = checks(operation, **parameters)
    assert (check.action, check.resource) == (f"sagemaker:{operation}", resource)


@pytest.mark.parametrize(
    ("operation", "parameters"),
    [
        ("DescribeModelPackage", {"ModelPackageName": "a-plain-name"}),
        (
            "DescribeModelPackage",
            {"ModelPackageName": "arn:aws:sagemaker:us-east-1:999999999999:model-package/acme-m/1"},
        ),
        ("CreateModelPackage", {"ModelPackageName": "unversioned"}),
        ("DeleteModelPackage", {"ModelPackageName": f"{BASE}:model-package/acme-m/1"}),
    ],
)
def test_what_it_cannot_place_is_refused(operation: str, parameters: dict[str, str]) -> None:
    with pytest.raises(UnmappedError):
        checks(operation, **parameters)
