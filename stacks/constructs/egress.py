"""A tenant's way out to a few named hosts: training subnet -> firewall -> NAT gateway -> internet gateway.

A Network Firewall and not a DNS firewall: who knows an address needs no name server. It reads the name that a TLS
client states and lets no other packet of a connection through; the training group's rules let nothing but TCP 443 reach
it. Only the training subnet has a route to it, so endpoints and file system stay without.
"""

from aws_cdk import Fn, Tags
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from aws_cdk import aws_networkfirewall as networkfirewall
from constructs import Construct

from stacks.constructs.acknowledged import STATED_ZONES, acknowledge
from stacks.constructs.keys import TenantKeys
from stacks.constructs.logs import RETENTION
from stacks.constructs.network import TenantNetwork
from stacks.naming import TenantScope
from stacks.settings import removal_policy
from trainyard.spec.platform import EgressSpec

EGRESS_BLOCK, FIREWALL_BLOCK, NAT_BLOCK = "100.64.0.0/27", "100.64.0.0/28", "100.64.0.16/28"
"""A second block of the VPC, from the range for translated addresses (RFC 6598), which a VPC of any private range may
add: the first one is given out, and no subnet of a deployed tenant may move. The same for all tenants; nobody routes
to it."""

EVERYWHERE = "0.0.0.0/0"

ONLY_BEHIND_THE_FIREWALL = {
    "NIST.800.53.R5-VPCNoUnrestrictedRouteToIGW": (
        "The route of the NAT gateway's subnet, in which nothing else is: what gets there has passed the firewall."
    )
}

RULE_CAPACITY = 1000
"""Fixed when a rule group is made; many times MAX_ALLOWED_DOMAINS, so that a longer list never replaces the group."""


class TenantEgress(Construct):
    """The firewall with its allow-list, what it stands on, and the routes through it."""

    firewall: networkfirewall.CfnFirewall
    log: logs.LogGroup
    """What was dropped: with the host's name, where a client stated one."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        spec: EgressSpec,
        network: TenantNetwork,
        keys: TenantKeys,
    ) -> None:
        super().__init__(scope, construct_id)
        self._vpc_id, self._zone = network.vpc.vpc_id, tenant.availability_zone
        block = ec2.CfnVPCCidrBlock(self, "Block", vpc_id=self._vpc_id, cidr_block=EGRESS_BLOCK)
        fence, outside = self._subnet("Fence", FIREWALL_BLOCK, block), self._subnet("Outside", NAT_BLOCK, block)
        self.firewall = self._make_firewall(tenant, spec, network, fence)
        self.log = self._log_drops(tenant, keys)
        endpoint = Fn.select(1, Fn.split(":", Fn.select(0, self.firewall.attr_endpoint_ids)))
        gateway, attached = self._make_gateway()
        nat = self._make_nat(tenant, outside)
        self._route("TrainingToFence", network.training_subnet, EVERYWHERE, vpc_endpoint_id=endpoint)
        self._route("FenceToNat", fence, EVERYWHERE, nat_gateway_id=nat.ref)
        out = self._route("NatToInternet", outside, EVERYWHERE, gateway_id=gateway.ref)
        out.add_resource_dependency(attached)
        acknowledge(out, ONLY_BEHIND_THE_FIREWALL)
        nat.add_resource_dependency(out)  # a gateway that comes up before it can reach the internet fails
        # Narrower than the VPC's own route: answers pass the firewall too, which would else drop half a connection.
        back = network.training_subnet.ipv4_cidr_block
        self._route("AnswersToFence", outside, back, vpc_endpoint_id=endpoint)

    def _subnet(self, name: str, cidr: str, block: ec2.CfnVPCCidrBlock) -> ec2.PrivateSubnet:
        subnet = ec2.PrivateSubnet(
            self,
            name,
            vpc_id=self._vpc_id,
            availability_zone=self._zone,
            cidr_block=cidr,
            map_public_ip_on_launch=False,
        )
        subnet.node.add_dependency(block)
        acknowledge(subnet, STATED_ZONES)
        return subnet

    def _make_firewall(
        self, tenant: TenantScope, spec: EgressSpec, network: TenantNetwork, fence: ec2.PrivateSubnet
    ) -> networkfirewall.CfnFirewall:
        group = networkfirewall.CfnRuleGroup
        hosts = group(
            self,
            "Hosts",
            rule_group_name=tenant.stack_name("hosts"),
            type="STATEFUL",
            capacity=RULE_CAPACITY,
            description=f"Hosts that tenant {tenant.name} may reach",
            rule_group=group.RuleGroupProperty(
                rule_variables=group.RuleVariablesProperty(
                    ip_sets={"HOME_NET": group.IPSetProperty(definition=[network.training_subnet.ipv4_cidr_block])}
                ),
                rules_source=group.RulesSourceProperty(
                    rules_source_list=group.RulesSourceListProperty(
                        generated_rules_type="ALLOWLIST",
                        target_types=["TLS_SNI"],
                        targets=sorted(spec.allowed_domains),
                    )
                ),
                stateful_rule_options=group.StatefulRuleOptionsProperty(rule_order="STRICT_ORDER"),
            ),
        )
        rules = networkfirewall.CfnFirewallPolicy
        policy = rules(
            self,
            "Policy",
            firewall_policy_name=tenant.stack_name("egress"),
            description=f"Drops what tenant {tenant.name} may not reach",
            firewall_policy=rules.FirewallPolicyProperty(
                # Everything to the stateful engine; fragments too, or a name could hide in one.
                stateless_default_actions=["aws:forward_to_sfe"],
                stateless_fragment_default_actions=["aws:forward_to_sfe"],
                stateful_engine_options=rules.StatefulEngineOptionsProperty(
                    rule_order="STRICT_ORDER", stream_exception_policy="REJECT"
                ),
                # After the handshake: before it nothing has stated a name. The application-layer kind waits for a
                # greeting that comes in several packets, as those with post-quantum keys do.
                stateful_default_actions=["aws:drop_established_app_layer", "aws:alert_established_app_layer"],
                stateful_rule_group_references=[
                    rules.StatefulRuleGroupReferenceProperty(resource_arn=hosts.attr_rule_group_arn, priority=1)
                ],
            ),
        )
        return networkfirewall.CfnFirewall(
            self,
            "Firewall",
            firewall_name=tenant.stack_name("egress"),
            firewall_policy_arn=policy.attr_firewall_policy_arn,
            vpc_id=self._vpc_id,
            subnet_mappings=[networkfirewall.CfnFirewall.SubnetMappingProperty(subnet_id=fence.subnet_id)],
            # The stack itself is protected where data is kept; this would keep a tenant from being removed.
            delete_protection=False,
            description=f"What tenant {tenant.name} may reach outside of AWS",
        )

    def _log_drops(self, tenant: TenantScope, keys: TenantKeys) -> logs.LogGroup:
        group = logs.LogGroup(
            self,
            "Dropped",
            encryption_key=keys.logs,
            retention=RETENTION[tenant.spec.log_retention_days],
            removal_policy=removal_policy(tenant.environment),
        )
        logging = networkfirewall.CfnLoggingConfiguration
        logging(
            self,
            "Logging",
            firewall_arn=self.firewall.attr_firewall_arn,
            logging_configuration=logging.LoggingConfigurationProperty(
                log_destination_configs=[
                    logging.LogDestinationConfigProperty(
                        log_type="ALERT",
                        log_destination_type="CloudWatchLogs",
                        log_destination={"logGroup": group.log_group_name},
                    )
                ]
            ),
        )
        return group

    def _make_gateway(self) -> tuple[ec2.CfnInternetGateway, ec2.CfnVPCGatewayAttachment]:
        gateway = ec2.CfnInternetGateway(self, "Internet")
        link = ec2.CfnVPCGatewayAttachment(self, "Attached", vpc_id=self._vpc_id, internet_gateway_id=gateway.ref)
        return gateway, link

    def _make_nat(self, tenant: TenantScope, outside: ec2.PrivateSubnet) -> ec2.CfnNatGateway:
        address = ec2.CfnEIP(self, "Address", domain="vpc")
        nat = ec2.CfnNatGateway(self, "Nat", subnet_id=outside.subnet_id, allocation_id=address.attr_allocation_id)
        Tags.of(nat).add("Name", tenant.stack_name("egress"))
        return nat

    def _route(self, name: str, subnet: ec2.PrivateSubnet, destination: str, **target: str) -> ec2.CfnRoute:
        return ec2.CfnRoute(
            self,
            name,
            route_table_id=subnet.route_table.route_table_id,
            destination_cidr_block=destination,
            **target,
        )
