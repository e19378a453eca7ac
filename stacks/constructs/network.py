"""A tenant's network: no way in, no way out, EFA inside, AWS through endpoints that admit only the tenant's roles."""

import ipaddress

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.acknowledged import STATED_ZONES, acknowledge
from stacks.naming import PARTITION, TenantScope

LUSTRE_PORTS = (ec2.Port.tcp(988), ec2.Port.tcp_range(1018, 1023))
"""FSx for Lustre user guide, "File system access control": many templates open 1021-1023 only, and mounts then hang."""

INTERFACE_ENDPOINTS = {
    "SageMaker": ec2.InterfaceVpcEndpointAwsService.SAGEMAKER_API,
    "Logs": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
    "Metrics": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_MONITORING,
    "EcrApi": ec2.InterfaceVpcEndpointAwsService.ECR,
    "EcrDocker": ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER,
    "Kms": ec2.InterfaceVpcEndpointAwsService.KMS,
    "Parameters": ec2.InterfaceVpcEndpointAwsService.SSM,
    "Sts": ec2.InterfaceVpcEndpointAwsService.STS,
}

CLUSTER_ENDPOINTS = {
    "Cluster": ec2.InterfaceVpcEndpointAwsService.PARALLEL_COMPUTING_SERVICE,
    "Sessions": ec2.InterfaceVpcEndpointAwsService.SSM_MESSAGES,
}
"""For a tenant with a cluster: machines join it, and people reach the login node. Without ec2messages: Run Command
needs it, sessions don't."""

TRACKING_ENDPOINTS = {"Tracking": ec2.InterfaceVpcEndpointAwsService.SAGEMAKER_EXPERIMENTS}
"""For a tenant with an MLflow server: jobs reach it without a way out."""


DEFAULT_GROUP = {
    "NIST.800.53.R5-VPCDefaultSecurityGroupClosed": (
        "CloudFormation can't change a default group without a function of our own that may change groups. Nothing is "
        "in it: jobs in another group than the tenant's own are refused by the boundary and stopped by the detective."
    )
}

EFA_RULES = {
    "NIST.800.53.R5-EC2RestrictedCommonPorts": (
        "EFA needs every protocol between the members of the group, and the group itself is the source: no address is "
        "let in."
    )
}
EFA_SERVERS = {
    "NIST.800.53.R5-EC2RestrictedCommonPorts": (
        "FSx makes a file system with EFA only where every protocol passes among its servers, and between them and the "
        "training instances: the servers' group and the instances' are the sources, and no address is let in."
    )
}


def most_zones(vpc_prefix_length: int) -> int:
    """For endpoints in one half of a VPC: AWS has no subnet smaller than /28."""
    return int(2 ** (28 - (vpc_prefix_length + 1)))


def subnet_blocks(vpc_cidr: str, num_zones: int) -> tuple[str, list[str]]:
    """The VPC's first half for training, and one equal piece of the other half per zone for endpoints.

    Training takes half because an instance with EFA needs an address per network card: up to 33 for p5.48xlarge.
    """
    training, rest = ipaddress.IPv4Network(vpc_cidr).subnets(prefixlen_diff=1)
    pieces = list(rest.subnets(prefixlen_diff=max(0, (num_zones - 1).bit_length())))
    assert num_zones <= most_zones(rest.prefixlen - 1), "checked before synthesis"
    return str(training), [str(piece) for piece in pieces[:num_zones]]


class TenantNetwork(Construct):
    """VPC without gateway or NAT; one training subnet in the first zone; endpoints in all zones that take them."""

    vpc: ec2.Vpc
    training_subnet: ec2.PrivateSubnet
    training_security_group: ec2.SecurityGroup
    """EFA: everything within the group. Also the client group of the file system."""
    file_system_security_group: ec2.SecurityGroup
    s3_endpoint: ec2.GatewayVpcEndpoint
    tables_endpoint: ec2.GatewayVpcEndpoint
    interface_endpoints: dict[str, ec2.InterfaceVpcEndpoint]
    """By the names of INTERFACE_, CLUSTER_ and TRACKING_ENDPOINTS. What endpoints let through is in `passages`."""
    lustre_rules: list[Construct]
    """Must exist before the file system: FSx checks them when it is created."""

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope) -> None:
        super().__init__(scope, construct_id)
        cidr = tenant.environment.network.block(tenant.spec.network_index)
        zones = list(tenant.environment.availability_zones)
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(cidr),
            availability_zones=zones,
            subnet_configuration=[],  # the subnets below: CDK's own are all of one size, in every zone
            nat_gateways=0,
            create_internet_gateway=False,
            restrict_default_security_group=False,  # would need a custom resource's Lambda; nothing uses that group
        )
        acknowledge(self.vpc, DEFAULT_GROUP)
        endpoint_zones = tenant.environment.endpoint_zones
        training_block, endpoint_blocks = subnet_blocks(cidr, len(endpoint_zones))
        self.training_subnet = self._subnet("Training", zones[0], training_block)
        endpoint_subnets = [
            self._subnet(f"Endpoints{number}", zone, block)
            for number, (zone, block) in enumerate(zip(endpoint_zones, endpoint_blocks, strict=True), start=1)
        ]
        self._make_training_group()
        self._make_file_system_group(efa=tenant.spec.file_system.efa)
        self._make_gateway_endpoints(tenant, [self.training_subnet, *endpoint_subnets])
        services = INTERFACE_ENDPOINTS | (CLUSTER_ENDPOINTS if tenant.spec.cluster is not None else {})
        if tenant.hyperpod:
            services = {name: service for name, service in services.items() if name != "Cluster"}
        services |= TRACKING_ENDPOINTS if tenant.spec.tracking is not None else {}
        self._make_interface_endpoints(services, endpoint_subnets)

    def _subnet(self, name: str, zone: str, block: str) -> ec2.PrivateSubnet:
        subnet = ec2.PrivateSubnet(
            self, name, vpc_id=self.vpc.vpc_id, availability_zone=zone, cidr_block=block, map_public_ip_on_launch=False
        )
        acknowledge(subnet, STATED_ZONES)
        return subnet

    def _group(self, name: str, description: str) -> ec2.SecurityGroup:
        # allow_all_outbound=True would swallow the self-egress rule that EFA needs: CDK then emits no egress resource.
        return ec2.SecurityGroup(self, name, vpc=self.vpc, description=description, allow_all_outbound=False)

    def _make_training_group(self) -> None:
        group = self._group("TrainingGroup", "Training instances: EFA and TCP among themselves")
        group.add_ingress_rule(group, ec2.Port.all_traffic(), "EFA needs every protocol from the group itself")
        acknowledge(group, EFA_RULES)
        group.add_egress_rule(group, ec2.Port.all_traffic(), "EFA needs every protocol to the group itself")
        # The VPC has no route out: this reaches the endpoints and, by prefix-list routes, S3 and DynamoDB.
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS services through the VPC endpoints")
        self.training_security_group = group

    def _make_file_system_group(self, *, efa: bool) -> None:
        """`efa`: FSx refuses to make a file system with EFA unless everything passes between its servers, and between
        them and the clients' group (FSx for Lustre user guide, "EFA-enabled security groups")."""
        clients, servers = self.training_security_group, self._group("FileSystemGroup", "FSx for Lustre file servers")
        if efa:
            acknowledge(servers, EFA_SERVERS)
        for port in (ec2.Port.all_traffic(),) if efa else LUSTRE_PORTS:
            # Servers call clients back (lock recalls): both directions on both sides. Servers also talk to each other.
            servers.add_ingress_rule(clients, port, "Lustre clients")
            servers.add_egress_rule(clients, port, "Lustre clients")
            servers.add_ingress_rule(servers, port, "Lustre servers among themselves")
            servers.add_egress_rule(servers, port, "Lustre servers among themselves")
            clients.add_ingress_rule(servers, port, "Lustre servers")
            clients.add_egress_rule(servers, port, "Lustre servers")
        self.file_system_security_group = servers
        rule_types = (ec2.CfnSecurityGroupIngress, ec2.CfnSecurityGroupEgress)
        self.lustre_rules = [
            child for group in (clients, servers) for child in group.node.find_all() if isinstance(child, rule_types)
        ]

    def _make_gateway_endpoints(self, tenant: TenantScope, subnets: list[ec2.PrivateSubnet]) -> None:
        selection = [ec2.SubnetSelection(subnets=list(subnets))]
        service = ec2.GatewayVpcEndpointAwsService.S3
        self.s3_endpoint = self.vpc.add_gateway_endpoint("S3", service=service, subnets=selection)
        # ECR keeps image layers in a bucket of its own and fetches them by a presigned URL of its own.
        layers = f"arn:{PARTITION}:s3:::prod-{tenant.environment.region}-starport-layer-bucket/*"
        self.s3_endpoint.add_to_policy(
            iam.PolicyStatement(
                sid="EcrImageLayers", principals=[iam.AnyPrincipal()], actions=["s3:GetObject"], resources=[layers]
            )
        )
        self.tables_endpoint = self.vpc.add_gateway_endpoint(
            "DynamoDb", service=ec2.GatewayVpcEndpointAwsService.DYNAMODB, subnets=selection
        )

    def _make_interface_endpoints(
        self, services: dict[str, ec2.InterfaceVpcEndpointAwsService], subnets: list[ec2.PrivateSubnet]
    ) -> None:
        group = self._group("EndpointGroup", "Interface endpoints")
        group.add_ingress_rule(self.training_security_group, ec2.Port.tcp(443), "Training instances")
        self.interface_endpoints = {}
        for name, service in services.items():
            self.interface_endpoints[name] = ec2.InterfaceVpcEndpoint(
                self,
                name,
                vpc=self.vpc,
                service=service,
                subnets=ec2.SubnetSelection(subnets=list(subnets)),
                security_groups=[group],
                private_dns_enabled=True,
                open=False,  # open=True would admit the VPC's whole range
            )
