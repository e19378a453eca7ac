"""The login node of a HyperPod cluster, as Session Manager names it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from launch_testing import contract_content

from trainyard.errors import AwsRefusedError
from trainyard.launch.cluster_shell import SessionShell
from trainyard.spec.platform import ClusterContract, TenantContract

ARN = "arn:aws:sagemaker:us-east-1:123456789012:cluster/a1b2c3d4e5f6"


def node(name: str, group: str, status: str = "Running") -> dict[str, Any]:
    return {
        "InstanceGroupName": group,
        "InstanceId": name,
        "InstanceType": "ml.m5.large",
        "LaunchTime": "2026-01-01T00:00:00Z",
        "InstanceStatus": {"Status": status},
    }


@pytest.fixture
def sagemaker() -> Iterator[tuple[Any, Stubber]]:
    """botocore's own model of the call, without AWS."""
    client = boto3.client("sagemaker", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y")
    with Stubber(client) as stub:
        yield client, stub


def shell(client: Any) -> SessionShell:
    cluster = ClusterContract(engine="hyperpod", id=ARN, queues={"train": ("p5.48xlarge",)}, login_tag="login")
    contract = TenantContract.model_validate(contract_content() | {"version": 4, "cluster": cluster.model_dump()})
    return SessionShell(SimpleNamespace(client=lambda service: client), contract)  # type: ignore[arg-type]


def test_the_target_names_cluster_group_and_machine(sagemaker: tuple[Any, Stubber]) -> None:
    client, stub = sagemaker
    nodes = [node("i-0bbb1111", "login", "Pending"), node("i-0ccc1111", "login"), node("i-0aaa1111", "login-test")]
    asked = {"ClusterName": ARN, "InstanceGroupNameContains": "login"}
    stub.add_response("list_cluster_nodes", {"ClusterNodeSummaries": nodes, "NextToken": ""}, asked)
    assert shell(client).login_node() == "sagemaker-cluster:a1b2c3d4e5f6_login-i-0ccc1111"


def test_without_a_running_login_node_a_line_says_where_to_look(sagemaker: tuple[Any, Stubber]) -> None:
    client, stub = sagemaker
    stub.add_response("list_cluster_nodes", {"ClusterNodeSummaries": [], "NextToken": ""})
    with pytest.raises(AwsRefusedError) as refused:
        shell(client).login_node()
    assert "aws sagemaker describe-cluster --cluster-name" in str(refused.value) and "\n" not in str(refused.value)
