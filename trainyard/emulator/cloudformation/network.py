"""EC2 networking: VPCs and all that lies in them."""

import uuid
from typing import Any

from trainyard.emulator.cloudformation.model import (
    Created,
    Properties,
    ResourceType,
    Site,
    as_bool,
    as_list,
    found,
    ignore_missing,
    tags_of,
    to_api,
)


def _tagged(kind: str, properties: Properties) -> dict[str, Any]:
    tags = tags_of(properties)
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags}]} if tags else {}


def _retag(site: Site, physical_id: str, old: Properties, new: Properties) -> None:
    kept = tags_of(new)
    dropped = [tag for tag in tags_of(old) if tag["Key"] not in {other["Key"] for other in kept}]
    if dropped:
        site.client("ec2").delete_tags(Resources=[physical_id], Tags=[{"Key": tag["Key"]} for tag in dropped])
    if kept:
        site.client("ec2").create_tags(Resources=[physical_id], Tags=kept)


def _create_vpc(site: Site, properties: Properties, generated: str) -> Created:
    ec2 = site.client("ec2")
    parameters = to_api("ec2", "CreateVpc", properties, without=("Tags", "EnableDnsSupport", "EnableDnsHostnames"))
    vpc = ec2.create_vpc(**parameters, **_tagged("vpc", properties))["Vpc"]
    _set_dns(site, vpc["VpcId"], properties)
    in_vpc = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
    default = [*in_vpc, {"Name": "group-name", "Values": ["default"]}]
    group = ec2.describe_security_groups(Filters=default)["SecurityGroups"][0]["GroupId"]
    acl = ec2.describe_network_acls(Filters=in_vpc)["NetworkAcls"][0]["NetworkAclId"]
    associations = [item["AssociationId"] for item in vpc.get("CidrBlockAssociationSet", [])]
    attributes = {
        "VpcId": vpc["VpcId"],
        "CidrBlock": vpc["CidrBlock"],
        "DefaultSecurityGroup": group,
        "DefaultNetworkAcl": acl,
        "CidrBlockAssociations": associations,
        "Ipv6CidrBlocks": [],
    }
    return Created(vpc["VpcId"], attributes)


def _set_dns(site: Site, vpc_id: str, properties: Properties) -> None:
    ec2 = site.client("ec2")
    for name, default in (("EnableDnsSupport", True), ("EnableDnsHostnames", False)):
        ec2.modify_vpc_attribute(VpcId=vpc_id, **{name: {"Value": as_bool(properties.get(name, default))}})


def _update_vpc(site: Site, vpc_id: str, old: Properties, new: Properties) -> None:
    _set_dns(site, vpc_id, new)
    _retag(site, vpc_id, old, new)


def _delete_vpc(site: Site, vpc_id: str, properties: Properties) -> None:
    ec2 = site.client("ec2")
    # AWS deletes the default group, ACL and main table with the VPC; moto wants the tables gone first.
    ignore_missing(lambda: ec2.delete_vpc(VpcId=vpc_id))


def _create_subnet(site: Site, properties: Properties, generated: str) -> Created:
    ec2 = site.client("ec2")
    parameters = to_api("ec2", "CreateSubnet", properties, without=("Tags", "MapPublicIpOnLaunch"))
    subnet = ec2.create_subnet(**parameters, **_tagged("subnet", properties))["Subnet"]
    _set_public(site, subnet["SubnetId"], properties)
    names = ("SubnetId", "VpcId", "CidrBlock", "AvailabilityZone", "AvailabilityZoneId")
    return Created(subnet["SubnetId"], {name: subnet.get(name, "") for name in names} | {"NetworkAclAssociationId": ""})


def _set_public(site: Site, subnet_id: str, properties: Properties) -> None:
    value = {"Value": as_bool(properties.get("MapPublicIpOnLaunch", False))}
    site.client("ec2").modify_subnet_attribute(SubnetId=subnet_id, MapPublicIpOnLaunch=value)


def _update_subnet(site: Site, subnet_id: str, old: Properties, new: Properties) -> None:
    _set_public(site, subnet_id, new)
    _retag(site, subnet_id, old, new)


def _create_route_table(site: Site, properties: Properties, generated: str) -> Created:
    answer = site.client("ec2").create_route_table(VpcId=properties["VpcId"], **_tagged("route-table", properties))
    table_id = answer["RouteTable"]["RouteTableId"]
    return Created(table_id, {"RouteTableId": table_id})


def _associate(site: Site, properties: Properties, generated: str) -> Created:
    answer = site.client("ec2").associate_route_table(
        RouteTableId=properties["RouteTableId"], SubnetId=properties["SubnetId"]
    )
    return Created(answer["AssociationId"], {"Id": answer["AssociationId"]})


def _association_exists(site: Site, association_id: str) -> bool:
    filters = [{"Name": "association.route-table-association-id", "Values": [association_id]}]
    return bool(site.client("ec2").describe_route_tables(Filters=filters)["RouteTables"])


def _create_route(site: Site, properties: Properties, generated: str) -> Created:
    site.client("ec2").create_route(**to_api("ec2", "CreateRoute", properties))
    destination = properties.get("DestinationCidrBlock") or properties.get("DestinationIpv6CidrBlock") or ""
    return Created(f"{properties['RouteTableId']}|{destination}", {"CidrBlock": destination})


def _update_route(site: Site, physical_id: str, old: Properties, new: Properties) -> None:
    # AWS has ReplaceRoute for it; moto's doesn't know every target.
    _delete_route(site, physical_id, old)
    _create_route(site, new, "")


def _route_exists(site: Site, physical_id: str) -> bool:
    table_id, _, destination = physical_id.partition("|")

    def look() -> bool:
        tables = site.client("ec2").describe_route_tables(RouteTableIds=[table_id])["RouteTables"]
        routes = [route for table in tables for route in table["Routes"]]
        return any(
            destination in (route.get("DestinationCidrBlock"), route.get("DestinationIpv6CidrBlock"))
            for route in routes
        )

    return found(look)


def _delete_route(site: Site, physical_id: str, properties: Properties) -> None:
    table_id, _, destination = physical_id.partition("|")
    ignore_missing(lambda: site.client("ec2").delete_route(RouteTableId=table_id, DestinationCidrBlock=destination))


def _create_security_group(site: Site, properties: Properties, generated: str) -> Created:
    ec2 = site.client("ec2")
    parameters = {"GroupName": properties.get("GroupName") or generated, "Description": properties["GroupDescription"]}
    group_id = ec2.create_security_group(
        **parameters, VpcId=properties["VpcId"], **_tagged("security-group", properties)
    )["GroupId"]
    if properties.get("SecurityGroupEgress"):
        # A group is born with "all out"; stated egress rules replace it.
        everything = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        ec2.revoke_security_group_egress(GroupId=group_id, IpPermissions=[everything])
    for direction in ("Ingress", "Egress"):
        for rule in properties.get(f"SecurityGroup{direction}", []):
            _authorize(site, direction, {**rule, "GroupId": group_id})
    return Created(group_id, {"GroupId": group_id, "VpcId": properties["VpcId"], "Id": group_id})


def _update_security_group(site: Site, group_id: str, old: Properties, new: Properties) -> None:
    ec2 = site.client("ec2")
    for direction, revoke in (
        ("Ingress", ec2.revoke_security_group_ingress),
        ("Egress", ec2.revoke_security_group_egress),
    ):
        before, after = (version.get(f"SecurityGroup{direction}", []) for version in (old, new))
        for rule in before:
            if rule not in after:
                revoke(GroupId=group_id, IpPermissions=[_permission(rule)])
        for rule in after:
            if rule not in before:
                _authorize(site, direction, {**rule, "GroupId": group_id})
    _retag(site, group_id, old, new)


def _permission(rule: Properties) -> dict[str, Any]:
    permission: dict[str, Any] = {"IpProtocol": str(rule["IpProtocol"])}
    for port in ("FromPort", "ToPort"):
        if port in rule:
            permission[port] = int(rule[port])
    described = {"Description": rule["Description"]} if rule.get("Description") else {}
    other = rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId")
    prefix_list = rule.get("SourcePrefixListId") or rule.get("DestinationPrefixListId")
    if other:
        permission["UserIdGroupPairs"] = [{"GroupId": other, **described}]
    elif rule.get("CidrIp"):
        permission["IpRanges"] = [{"CidrIp": rule["CidrIp"], **described}]
    elif rule.get("CidrIpv6"):
        permission["Ipv6Ranges"] = [{"CidrIpv6": rule["CidrIpv6"], **described}]
    elif prefix_list:
        permission["PrefixListIds"] = [{"PrefixListId": prefix_list, **described}]
    return permission


def _authorize(site: Site, direction: str, rule: Properties) -> str:
    ec2 = site.client("ec2")
    authorize = ec2.authorize_security_group_ingress if direction == "Ingress" else ec2.authorize_security_group_egress
    answer = authorize(GroupId=rule["GroupId"], IpPermissions=[_permission(rule)])
    return str(answer["SecurityGroupRules"][0]["SecurityGroupRuleId"])


def _rule_type(direction: str) -> ResourceType:
    def create(site: Site, properties: Properties, generated: str) -> Created:
        rule_id = _authorize(site, direction, properties)
        return Created(rule_id, {"Id": rule_id})

    def delete(site: Site, rule_id: str, properties: Properties) -> None:
        ec2 = site.client("ec2")
        revoke = ec2.revoke_security_group_ingress if direction == "Ingress" else ec2.revoke_security_group_egress
        ignore_missing(lambda: revoke(GroupId=properties["GroupId"], IpPermissions=[_permission(properties)]))

    def exists(site: Site, rule_id: str) -> bool:
        return found(
            lambda: site.client("ec2").describe_security_group_rules(SecurityGroupRuleIds=[rule_id])[
                "SecurityGroupRules"
            ]
        )

    def describe(site: Site, rule_id: str, old: Properties, new: Properties) -> Created:
        # AWS keeps the rule; moto changes no description but those of addresses.
        delete(site, rule_id, old)
        return create(site, new, "")

    end = "Source" if direction == "Ingress" else "Destination"
    replacing = ("CidrIp", "CidrIpv6", "FromPort", "GroupId", "IpProtocol", "ToPort")
    own = ("SourceSecurityGroupName", "SourceSecurityGroupOwnerId", "GroupName") if direction == "Ingress" else ()
    return ResourceType(
        f"AWS::EC2::SecurityGroup{direction}",
        create,
        exists,
        delete,
        describe,
        (*replacing, f"{end}PrefixListId", f"{end}SecurityGroupId", *own),
    )


def _create_endpoint(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("ec2", "CreateVpcEndpoint", properties, without=("Tags",))
    answer = site.client("ec2").create_vpc_endpoint(**parameters, **_tagged("vpc-endpoint", properties))
    endpoint = answer["VpcEndpoint"]
    entries = [
        f"{entry.get('HostedZoneId', '')}:{entry.get('DnsName', '')}" for entry in endpoint.get("DnsEntries", [])
    ]
    attributes = {
        "Id": endpoint["VpcEndpointId"],
        "DnsEntries": entries,
        "NetworkInterfaceIds": endpoint.get("NetworkInterfaceIds", []),
    }
    return Created(endpoint["VpcEndpointId"], attributes)


def _endpoint_exists(site: Site, endpoint_id: str) -> bool:
    def look() -> bool:
        endpoints = site.client("ec2").describe_vpc_endpoints(VpcEndpointIds=[endpoint_id])["VpcEndpoints"]
        return any(endpoint["State"].lower() not in ("deleting", "deleted") for endpoint in endpoints)

    return found(look)


def _update_endpoint(site: Site, endpoint_id: str, old: Properties, new: Properties) -> None:
    changes: dict[str, Any] = {}
    if old.get("PolicyDocument") != new.get("PolicyDocument"):
        changes |= to_api(
            "ec2",
            "ModifyVpcEndpoint",
            {"PolicyDocument": new["PolicyDocument"]} if new.get("PolicyDocument") else {"ResetPolicy": True},
        )
    for name, singular in (
        ("RouteTableIds", "RouteTableIds"),
        ("SubnetIds", "SubnetIds"),
        ("SecurityGroupIds", "SecurityGroupIds"),
    ):
        before, after = set(as_list(old.get(name))), set(as_list(new.get(name)))
        if after - before:
            changes[f"Add{singular}"] = sorted(after - before)
        if before - after:
            changes[f"Remove{singular}"] = sorted(before - after)
    if changes:
        site.client("ec2").modify_vpc_endpoint(VpcEndpointId=endpoint_id, **changes)
    _retag(site, endpoint_id, old, new)


def _create_flow_log(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("ec2", "CreateFlowLogs", properties, without=("Tags", "ResourceId"))
    # moto knows no permission to check a delivery role with; the ids are what flow logs are found by.
    answer = site.client("ec2").create_flow_logs(
        **parameters, ResourceIds=[properties["ResourceId"]], **_tagged("vpc-flow-log", properties)
    )
    if answer.get("Unsuccessful"):
        raise ValueError(str(answer["Unsuccessful"][0]["Error"]["Message"]))
    return Created(answer["FlowLogIds"][0], {"Id": answer["FlowLogIds"][0]})


def _create_address(site: Site, properties: Properties, generated: str) -> Created:
    answer = site.client("ec2").allocate_address(
        Domain=properties.get("Domain", "vpc"), **_tagged("elastic-ip", properties)
    )
    return Created(answer["PublicIp"], {"AllocationId": answer["AllocationId"], "PublicIp": answer["PublicIp"]})


def _update_address(site: Site, public_ip: str, old: Properties, new: Properties) -> None:
    (address,) = site.client("ec2").describe_addresses(PublicIps=[public_ip])["Addresses"]
    _retag(site, address["AllocationId"], old, new)


def _delete_address(site: Site, public_ip: str, properties: Properties) -> None:
    ec2 = site.client("ec2")
    if not found(lambda: ec2.describe_addresses(PublicIps=[public_ip])["Addresses"]):
        return
    for address in ec2.describe_addresses(PublicIps=[public_ip])["Addresses"]:
        allocation_id = address["AllocationId"]
        ec2.release_address(AllocationId=allocation_id)


def _add_block(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("ec2", "AssociateVpcCidrBlock", properties)
    answer = site.client("ec2").associate_vpc_cidr_block(**parameters)["CidrBlockAssociation"]
    return Created(answer["AssociationId"], {"Id": answer["AssociationId"]})


def _block_exists(site: Site, association_id: str) -> bool:
    filters = [{"Name": "cidr-block-association.association-id", "Values": [association_id]}]
    return bool(site.client("ec2").describe_vpcs(Filters=filters)["Vpcs"])


def _create_firewall(site: Site, properties: Properties, generated: str) -> Created:
    """The endpoints that routes lead to, as Network Firewall makes them; what passes is nobody's question here."""
    ec2, endpoints = site.client("ec2"), []
    service = f"com.amazonaws.vpce.{site.region}.vpce-svc-networkfirewall"
    for mapping in properties["SubnetMappings"]:
        subnet = ec2.describe_subnets(SubnetIds=[mapping["SubnetId"]])["Subnets"][0]
        endpoint = ec2.create_vpc_endpoint(
            VpcId=properties["VpcId"],
            ServiceName=service,
            VpcEndpointType="GatewayLoadBalancer",
            SubnetIds=[mapping["SubnetId"]],
        )["VpcEndpoint"]
        endpoints.append(f"{subnet['AvailabilityZone']}:{endpoint['VpcEndpointId']}")
    arn = f"arn:aws:network-firewall:{site.region}:{site.account}:firewall/{properties['FirewallName']}"
    return Created(arn, {"FirewallArn": arn, "FirewallId": uuid.uuid4().hex, "EndpointIds": endpoints})


def _firewall_endpoints(site: Site, properties: Properties) -> list[str]:
    subnets = [mapping["SubnetId"] for mapping in properties["SubnetMappings"]]
    filters = [{"Name": "vpc-id", "Values": [properties["VpcId"]]}]
    found_here = site.client("ec2").describe_vpc_endpoints(Filters=filters)["VpcEndpoints"]
    return [
        item["VpcEndpointId"]
        for item in found_here
        if item["VpcEndpointType"] == "GatewayLoadBalancer" and set(item["SubnetIds"]) & set(subnets)
    ]


def _delete_firewall(site: Site, arn: str, properties: Properties) -> None:
    endpoints = _firewall_endpoints(site, properties)
    if endpoints:
        site.client("ec2").delete_vpc_endpoints(VpcEndpointIds=endpoints)


def _create_nat(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("ec2", "CreateNatGateway", properties, without=("Tags",))
    nat = site.client("ec2").create_nat_gateway(**parameters, **_tagged("natgateway", properties))["NatGateway"]
    return Created(nat["NatGatewayId"], {"NatGatewayId": nat["NatGatewayId"]})


def _nat_exists(site: Site, nat_id: str) -> bool:
    nats = site.client("ec2").describe_nat_gateways(NatGatewayIds=[nat_id])["NatGateways"]
    return any(nat["State"] not in ("deleted", "failed") for nat in nats)


def _create_internet_gateway(site: Site, properties: Properties, generated: str) -> Created:
    gateway = site.client("ec2").create_internet_gateway(**_tagged("internet-gateway", properties))["InternetGateway"]
    return Created(gateway["InternetGatewayId"], {"InternetGatewayId": gateway["InternetGatewayId"]})


def _attach_gateway(site: Site, properties: Properties, generated: str) -> Created:
    gateway_id, vpc_id = properties["InternetGatewayId"], properties["VpcId"]
    site.client("ec2").attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id)
    return Created(f"IGW|{vpc_id}|{gateway_id}", {"AttachmentType": "IGW"})


def _attachment_exists(site: Site, physical_id: str) -> bool:
    _, vpc_id, gateway_id = physical_id.split("|")

    def look() -> bool:
        gateways = site.client("ec2").describe_internet_gateways(InternetGatewayIds=[gateway_id])["InternetGateways"]
        return any(attachment["VpcId"] == vpc_id for gateway in gateways for attachment in gateway["Attachments"])

    return found(look)


def _detach_gateway(site: Site, physical_id: str, properties: Properties) -> None:
    _, vpc_id, gateway_id = physical_id.split("|")
    ignore_missing(lambda: site.client("ec2").detach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id))


def _create_launch_template(site: Site, properties: Properties, generated: str) -> Created:
    name = properties.get("LaunchTemplateName") or generated
    parameters = to_api("ec2", "CreateLaunchTemplate", {**properties, "LaunchTemplateName": name})
    template = site.client("ec2").create_launch_template(**parameters)["LaunchTemplate"]
    template_id = template["LaunchTemplateId"]
    return Created(
        template_id, {"LaunchTemplateId": template_id, "LatestVersionNumber": "1", "DefaultVersionNumber": "1"}
    )


def _update_launch_template(site: Site, template_id: str, old: Properties, new: Properties) -> dict[str, Any]:
    parameters = to_api("ec2", "CreateLaunchTemplateVersion", new, without=("LaunchTemplateName", "TagSpecifications"))
    version = site.client("ec2").create_launch_template_version(LaunchTemplateId=template_id, **parameters)
    return {"LatestVersionNumber": str(version["LaunchTemplateVersion"]["VersionNumber"])}


def _described(operation: str, argument: str, answer: str) -> Any:
    def exists(site: Site, physical_id: str) -> bool:
        return found(lambda: getattr(site.client("ec2"), operation)(**{argument: [physical_id]})[answer])

    return exists


def _deleted(operation: str, argument: str, *, as_ids: bool = False) -> Any:
    def delete(site: Site, physical_id: str, properties: Properties) -> None:
        value: Any = [physical_id] if as_ids else physical_id
        ignore_missing(lambda: getattr(site.client("ec2"), operation)(**{argument: value}))

    return delete


TYPES = (
    ResourceType(
        "AWS::EC2::VPC",
        _create_vpc,
        _described("describe_vpcs", "VpcIds", "Vpcs"),
        _delete_vpc,
        _update_vpc,
        ("CidrBlock", "InstanceTenancy", "Ipv4IpamPoolId", "Ipv4NetmaskLength", "VpcEncryptionControl"),
    ),
    ResourceType(
        "AWS::EC2::Subnet",
        _create_subnet,
        _described("describe_subnets", "SubnetIds", "Subnets"),
        _deleted("delete_subnet", "SubnetId"),
        _update_subnet,
        (
            "AvailabilityZone",
            "AvailabilityZoneId",
            "CidrBlock",
            "Ipv4IpamPoolId",
            "Ipv4NetmaskLength",
            "Ipv6CidrBlock",
            "Ipv6IpamPoolId",
            "Ipv6Native",
            "Ipv6NetmaskLength",
            "OutpostArn",
            "VpcId",
        ),
    ),
    ResourceType(
        "AWS::EC2::RouteTable",
        _create_route_table,
        _described("describe_route_tables", "RouteTableIds", "RouteTables"),
        _deleted("delete_route_table", "RouteTableId"),
        _retag,
        ("VpcId",),
    ),
    ResourceType(
        "AWS::EC2::SubnetRouteTableAssociation",
        _associate,
        _association_exists,
        _deleted("disassociate_route_table", "AssociationId"),
    ),
    ResourceType(
        "AWS::EC2::Route",
        _create_route,
        _route_exists,
        _delete_route,
        _update_route,
        ("DestinationCidrBlock", "DestinationIpv6CidrBlock", "DestinationPrefixListId", "RouteTableId"),
    ),
    ResourceType(
        "AWS::EC2::SecurityGroup",
        _create_security_group,
        _described("describe_security_groups", "GroupIds", "SecurityGroups"),
        _deleted("delete_security_group", "GroupId"),
        _update_security_group,
        ("VpcId", "GroupName", "GroupDescription"),
    ),
    _rule_type("Ingress"),
    _rule_type("Egress"),
    ResourceType(
        "AWS::EC2::VPCEndpoint",
        _create_endpoint,
        _endpoint_exists,
        _deleted("delete_vpc_endpoints", "VpcEndpointIds", as_ids=True),
        _update_endpoint,
        (
            "DnsOptions.PrivateDnsPreference",
            "DnsOptions.PrivateDnsSpecifiedDomains",
            "ResourceConfigurationArn",
            "ServiceName",
            "ServiceNetworkArn",
            "ServiceRegion",
            "VpcEndpointType",
            "VpcId",
        ),
    ),
    ResourceType(
        "AWS::EC2::FlowLog",
        _create_flow_log,
        _described("describe_flow_logs", "FlowLogIds", "FlowLogs"),
        _deleted("delete_flow_logs", "FlowLogIds", as_ids=True),
        _retag,
        (
            "DeliverCrossAccountRole",
            "DeliverLogsPermissionArn",
            "DestinationOptions",
            "LogDestination",
            "LogDestinationType",
            "LogFormat",
            "LogGroupName",
            "MaxAggregationInterval",
            "ResourceId",
            "ResourceType",
            "TagFieldSpecifications",
            "TrafficType",
        ),
    ),
    ResourceType(
        "AWS::EC2::EIP",
        _create_address,
        _described("describe_addresses", "PublicIps", "Addresses"),
        _delete_address,
        _update_address,
        ("Address", "IpamPoolId", "NetworkBorderGroup", "TransferAddress"),
    ),
    ResourceType(
        "AWS::EC2::VPCCidrBlock",
        _add_block,
        _block_exists,
        _deleted("disassociate_vpc_cidr_block", "AssociationId"),
    ),
    # Its endpoints are the EC2 API's, so that routes lead somewhere; the firewall itself is only recorded.
    ResourceType(
        "AWS::NetworkFirewall::Firewall",
        _create_firewall,
        lambda site, arn: True,
        _delete_firewall,
        lambda site, arn, old, new: None,
        # AWS adds and takes subnets in place; here a firewall's endpoints are made with it.
        ("FirewallName", "NatGatewayMappings", "NoSourcePreservation", "SubnetMappings", "VpcEndpoint", "VpcId"),
        "FirewallName",
        recorded=True,
    ),
    ResourceType(
        "AWS::EC2::NatGateway",
        _create_nat,
        _nat_exists,
        _deleted("delete_nat_gateway", "NatGatewayId"),
        _retag,
        ("AllocationId", "AvailabilityMode", "ConnectivityType", "PrivateIpAddress", "SubnetId", "VpcId"),
    ),
    ResourceType(
        "AWS::EC2::InternetGateway",
        _create_internet_gateway,
        _described("describe_internet_gateways", "InternetGatewayIds", "InternetGateways"),
        _deleted("delete_internet_gateway", "InternetGatewayId"),
        _retag,
    ),
    ResourceType("AWS::EC2::VPCGatewayAttachment", _attach_gateway, _attachment_exists, _detach_gateway),
    ResourceType(
        "AWS::EC2::LaunchTemplate",
        _create_launch_template,
        _described("describe_launch_templates", "LaunchTemplateIds", "LaunchTemplates"),
        _deleted("delete_launch_template", "LaunchTemplateId"),
        _update_launch_template,
        ("LaunchTemplateName",),
    ),
)
