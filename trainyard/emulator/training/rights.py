"""What a job's own role must be allowed so that SageMaker can set the job up, and that its network is there.

The network interfaces, the pull of the image and the grant for the volumes' key are SageMaker's, made as the job's role
(developer guide, "CreateTrainingJob API: Execution Role Permissions"). Nothing of them is made here; the rights are
asked for all the same, or a role without them would train here and fail on AWS.
"""

import re
from collections.abc import Mapping
from typing import Any

from moto.sagemaker.exceptions import AWSValidationException

from trainyard.emulator.authorization.actions import Check
from trainyard.emulator.authorization.decide import Judge
from trainyard.emulator.authorization.principals import Principals, Session
from trainyard.emulator.info import EmulatorInfo

_ECR_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([^@:]+)(?:[@:].+)?")
_PULL = ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")
_LEAVE = ("CreateNetworkInterfacePermission", "DeleteNetworkInterface", "DeleteNetworkInterfacePermission")
_SEE = ("DescribeNetworkInterfaces", "DescribeVpcs", "DescribeDhcpOptions", "DescribeSubnets", "DescribeSecurityGroups")


class JobRights:
    """Judges jobs' roles by the deployed policies."""

    def __init__(self, info: EmulatorInfo, principals: Principals) -> None:
        self._info, self._principals, self._judge = info, principals, Judge(principals)

    def require_network(self, request: Mapping[str, Any]) -> None:
        """ValidationException where the job's subnets or groups are not there, or not of one VPC."""
        network = request.get("VpcConfig")
        if not network:
            return
        subnets, groups = self._subnets(), self._groups()
        for kind, wanted, there in (
            ("subnet", network["Subnets"], subnets),
            ("security group", network["SecurityGroupIds"], groups),
        ):
            for name in wanted:
                if name not in there:
                    raise AWSValidationException(f"VpcConfig: the {kind} ID '{name}' does not exist")
        vpcs = {subnets[name] for name in network["Subnets"]} | {groups[name] for name in network["SecurityGroupIds"]}
        if len(vpcs) > 1:
            raise AWSValidationException(f"VpcConfig: subnets and security groups are of {len(vpcs)} VPCs, not of one")

    def denial(self, request: Mapping[str, Any], session: Session) -> str:
        """What the job's role, as SageMaker has assumed it, may not do of what the job needs; empty: all is well.

        Asked as an attempt starts: the network may have gone since the job was made.
        """
        try:
            self.require_network(request)
        except AWSValidationException as gone:
            return str(gone.message)
        principal = self._principals.resolve(session.access_key_id, session.session_token)
        for check in [*self._image(request), *self._network(request), *self._volumes(request)]:
            denied = self._judge.deny(principal, check, self._info.region)
            if denied is not None:
                return denied.message
        return self._key_denial(request)

    def _key_denial(self, request: Mapping[str, Any]) -> str:
        for check in self._volumes(request):
            state = self._principals.key_state(check.resource)
            if state != "Enabled":
                return f"the volumes' key {check.resource} is {state or 'not there'}"
        return ""

    def _image(self, request: Mapping[str, Any]) -> list[Check]:
        image = _ECR_IMAGE.fullmatch(request["AlgorithmSpecification"]["TrainingImage"])
        if image is None:
            return []
        account, region, name = image.groups()
        repository = f"arn:aws:ecr:{region}:{account}:repository/{name}"
        return [Check("ecr:GetAuthorizationToken", "*"), *(Check(f"ecr:{action}", repository) for action in _PULL)]

    def _network(self, request: Mapping[str, Any]) -> list[Check]:
        network = request.get("VpcConfig")
        if not network:
            return []
        ec2 = f"arn:aws:ec2:{self._info.region}:{self._info.account}"
        vpc = {"ec2:vpc": f"{ec2}:vpc/{self._subnets()[network['Subnets'][0]]}"}
        interface = f"{ec2}:network-interface/*"
        joined = [
            *(f"{ec2}:subnet/{name}" for name in network["Subnets"]),
            *(f"{ec2}:security-group/{name}" for name in network["SecurityGroupIds"]),
            interface,
        ]
        return [
            *(Check(f"ec2:{action}", "*") for action in _SEE),
            *(Check("ec2:CreateNetworkInterface", resource, vpc) for resource in joined),
            *(Check(f"ec2:{action}", interface, vpc) for action in _LEAVE),
        ]

    def _volumes(self, request: Mapping[str, Any]) -> list[Check]:
        key = request["ResourceConfig"].get("VolumeKmsKeyId")
        if not key:
            return []
        region = self._info.region
        said = {"kms:viaservice": f"sagemaker.{region}.amazonaws.com", "kms:grantisforawsresource": "true"}
        return [Check("kms:CreateGrant", self._principals.key_arn(key, region), said)]

    def _subnets(self) -> dict[str, str]:
        """Id to VPC."""
        zones = self._ec2().subnets.values()
        return {name: subnet.vpc_id for subnets in list(zones) for name, subnet in list(subnets.items())}

    def _groups(self) -> dict[str, str]:
        """Id to VPC."""
        vpcs = self._ec2().groups.items()
        return {name: vpc for vpc, groups in list(vpcs) for name in list(groups)}

    def _ec2(self) -> Any:
        from moto.ec2.models import ec2_backends

        return ec2_backends[self._info.account][self._info.region]
