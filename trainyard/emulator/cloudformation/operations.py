"""What watches and counts: logs, metrics, alarms, topics, rules, parameters, budgets."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainyard.emulator.cloudformation.model import (
    Created,
    Properties,
    ResourceType,
    Site,
    changed_tags,
    fit_name,
    found,
    ignore_missing,
    put_type,
    tags_of,
    to_api,
)


def _tag_map(properties: Properties) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags_of(properties)}


def _create_log_group(site: Site, properties: Properties, generated: str) -> Created:
    logs = site.client("logs")
    name = properties.get("LogGroupName") or generated
    parameters = to_api("logs", "CreateLogGroup", properties, without=("LogGroupName", "RetentionInDays", "Tags"))
    tags = {"tags": _tag_map(properties)} if tags_of(properties) else {}
    logs.create_log_group(logGroupName=name, **parameters, **tags)
    _set_retention(site, name, {}, properties)
    return Created(name, {"Arn": f"arn:aws:logs:{site.region}:{site.account}:log-group:{name}:*"})


def _update_log_group(site: Site, name: str, old: Properties, new: Properties) -> None:
    logs = site.client("logs")
    _set_retention(site, name, old, new)
    if new.get("KmsKeyId") != old.get("KmsKeyId"):
        if new.get("KmsKeyId"):
            logs.associate_kms_key(logGroupName=name, kmsKeyId=new["KmsKeyId"])
        else:
            logs.disassociate_kms_key(logGroupName=name)
    _retag(logs, "resourceArn", f"arn:aws:logs:{site.region}:{site.account}:log-group:{name}", old, new)


def _retag(client: Any, argument: str, arn: str, old: Properties, new: Properties) -> None:
    """By TagResource and UntagResource, which differ in the case of their parameters and the form of their tags."""
    gone, kept = changed_tags(old, new)
    spell = (lambda name: name[0].lower() + name[1:]) if argument[0].islower() else str
    if gone:
        client.untag_resource(**{argument: arn, spell("TagKeys"): gone})
    if kept:
        as_map = client.meta.service_model.operation_model("TagResource").input_shape.members[spell("Tags")].type_name
        tags = {tag["Key"]: tag["Value"] for tag in kept} if as_map == "map" else kept
        client.tag_resource(**{argument: arn, spell("Tags"): tags})


def _set_retention(site: Site, name: str, old: Properties, new: Properties) -> None:
    logs = site.client("logs")
    if new.get("RetentionInDays"):
        logs.put_retention_policy(logGroupName=name, retentionInDays=int(new["RetentionInDays"]))
    elif old.get("RetentionInDays"):
        logs.delete_retention_policy(logGroupName=name)


def _log_group_exists(site: Site, name: str) -> bool:
    groups = site.client("logs").describe_log_groups(logGroupNamePrefix=name)["logGroups"]
    return any(group["logGroupName"] == name for group in groups)


# A metric filter is known by its group and its name; Ref gives the name only, but both are needed to find it.
def _create_metric_filter(site: Site, properties: Properties, generated: str) -> Created:
    name = properties.get("FilterName") or generated
    _put_metric_filter(site, name, properties)
    return Created(f"{properties['LogGroupName']}|{name}")


def _put_metric_filter(site: Site, name: str, properties: Properties) -> None:
    plain = {**properties, "FilterName": name}
    plain["MetricTransformations"] = [
        {**item, "Dimensions": {pair["Key"]: pair["Value"] for pair in item["Dimensions"]}}
        if "Dimensions" in item
        else item
        for item in properties["MetricTransformations"]
    ]
    site.client("logs").put_metric_filter(**to_api("logs", "PutMetricFilter", plain))


def _update_metric_filter(site: Site, physical_id: str, old: Properties, new: Properties) -> None:
    _put_metric_filter(site, physical_id.partition("|")[2], new)


def _metric_filter_exists(site: Site, physical_id: str) -> bool:
    group, _, name = physical_id.partition("|")
    return found(
        lambda: site.client("logs").describe_metric_filters(logGroupName=group, filterNamePrefix=name)["metricFilters"]
    )


def _delete_metric_filter(site: Site, physical_id: str, properties: Properties) -> None:
    group, _, name = physical_id.partition("|")
    ignore_missing(lambda: site.client("logs").delete_metric_filter(logGroupName=group, filterName=name))


def _alarm_attributes(site: Site, name: str, answer: Any) -> Mapping[str, Any]:
    return {"Arn": f"arn:aws:cloudwatch:{site.region}:{site.account}:alarm:{name}"}


def _create_topic(site: Site, properties: Properties, generated: str) -> Created:
    sns = site.client("sns")
    name = properties.get("TopicName") or generated
    arn = sns.create_topic(Name=name, Tags=tags_of(properties))["TopicArn"]
    _set_topic_attributes(site, arn, {}, properties)
    for subscription in properties.get("Subscription", []):
        sns.subscribe(TopicArn=arn, Protocol=subscription["Protocol"], Endpoint=subscription["Endpoint"])
    return Created(arn, {"TopicArn": arn, "TopicName": name})


def _set_topic_attributes(site: Site, arn: str, old: Properties, new: Properties) -> None:
    for name in ("DisplayName", "KmsMasterKeyId", "TracingConfig", "SignatureVersion"):
        if old.get(name) != new.get(name):
            site.client("sns").set_topic_attributes(
                TopicArn=arn, AttributeName=name, AttributeValue=str(new.get(name, ""))
            )


def _update_topic(site: Site, arn: str, old: Properties, new: Properties) -> None:
    sns = site.client("sns")
    _set_topic_attributes(site, arn, old, new)
    _retag(sns, "ResourceArn", arn, old, new)
    before, after = old.get("Subscription") or [], new.get("Subscription") or []
    pages = sns.get_paginator("list_subscriptions_by_topic").paginate(TopicArn=arn)
    there = {(item["Protocol"], item["Endpoint"]): item for page in pages for item in page["Subscriptions"]}
    for item in before:
        if item not in after and (gone := there.get((item["Protocol"], item["Endpoint"]))):
            sns.unsubscribe(SubscriptionArn=gone["SubscriptionArn"])
    for item in after:
        if item not in before:
            sns.subscribe(TopicArn=arn, Protocol=item["Protocol"], Endpoint=item["Endpoint"])


def _topic_exists(site: Site, arn: str) -> bool:
    return found(lambda: site.client("sns").get_topic_attributes(TopicArn=arn)["Attributes"])


def _put_topic_policy(site: Site, properties: Properties) -> None:
    policy = json.dumps(properties["PolicyDocument"])
    for arn in properties["Topics"]:
        site.client("sns").set_topic_attributes(TopicArn=arn, AttributeName="Policy", AttributeValue=policy)


def _create_topic_policy(site: Site, properties: Properties, generated: str) -> Created:
    _put_topic_policy(site, properties)
    return Created("|".join(properties["Topics"]), {"Id": generated})


def _update_topic_policy(site: Site, physical_id: str, old: Properties, new: Properties) -> Created:
    _put_topic_policy(site, new)
    for arn in sorted(set(old["Topics"]) - set(new["Topics"])):
        ignore_missing(
            partial(site.client("sns").set_topic_attributes, TopicArn=arn, AttributeName="Policy", AttributeValue="")
        )
    return Created("|".join(new["Topics"]))


def _topic_policy_exists(site: Site, physical_id: str) -> bool:
    def look(arn: str) -> bool:
        policy = site.client("sns").get_topic_attributes(TopicArn=arn)["Attributes"].get("Policy", "")
        # A topic always has a policy; until ours is put it is the default one.
        return bool(policy) and "__default_policy_ID" not in policy

    return all(found(partial(look, arn)) for arn in physical_id.split("|"))


def _subscribe(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api(
        "sns",
        "Subscribe",
        properties,
        without=("FilterPolicy", "RawMessageDelivery", "DeliveryPolicy", "RedrivePolicy", "Region"),
    )
    arn = site.client("sns").subscribe(**parameters, ReturnSubscriptionArn=True)["SubscriptionArn"]
    _set_subscription(site, arn, {}, properties)
    return Created(arn, {"Arn": arn})


def _set_subscription(site: Site, arn: str, old: Properties, new: Properties) -> None:
    for name in ("FilterPolicy", "RawMessageDelivery", "DeliveryPolicy", "RedrivePolicy"):
        if old.get(name) != new.get(name):
            value = new.get(name, "false" if name == "RawMessageDelivery" else {})
            text = value if isinstance(value, str) else json.dumps(value)
            site.client("sns").set_subscription_attributes(SubscriptionArn=arn, AttributeName=name, AttributeValue=text)


def _subscription_exists(site: Site, arn: str) -> bool:
    return found(lambda: site.client("sns").get_subscription_attributes(SubscriptionArn=arn)["Attributes"])


def _create_parameter(site: Site, properties: Properties, generated: str) -> Created:
    name = properties.get("Name") or generated
    tags = {"Tags": tags_of(properties)} if tags_of(properties) else {}
    parameters = to_api("ssm", "PutParameter", properties, without=("Name", "Tags"))
    site.client("ssm").put_parameter(Name=name, **parameters, **tags)
    return Created(name, {"Type": properties["Type"], "Value": properties["Value"]})


def _update_parameter(site: Site, name: str, old: Properties, new: Properties) -> Mapping[str, Any]:
    parameters = to_api("ssm", "PutParameter", new, without=("Name", "Tags"))
    ssm = site.client("ssm")
    ssm.put_parameter(Name=name, Overwrite=True, **parameters)
    gone, kept = changed_tags(old, new)
    if gone:
        ssm.remove_tags_from_resource(ResourceType="Parameter", ResourceId=name, TagKeys=gone)
    if kept:
        ssm.add_tags_to_resource(ResourceType="Parameter", ResourceId=name, Tags=kept)
    return {"Type": new["Type"], "Value": new["Value"]}


def _parameter_exists(site: Site, name: str) -> bool:
    return found(lambda: site.client("ssm").get_parameter(Name=name))


def _bus_and_name(physical_id: str) -> tuple[str, str]:
    bus, separator, name = physical_id.rpartition("|")
    return (bus, name) if separator else ("default", physical_id)


def _create_rule(site: Site, properties: Properties, generated: str) -> Created:
    name = properties.get("Name") or fit_name(generated, 64)
    bus = properties.get("EventBusName") or "default"
    arn = _put_rule(site, bus, name, {}, properties)
    return Created(name if bus == "default" else f"{bus}|{name}", {"Arn": arn})


def _put_rule(site: Site, bus: str, name: str, old: Properties, new: Properties) -> str:
    events = site.client("events")
    parameters = to_api("events", "PutRule", new, without=("Name", "Targets", "EventBusName", "Tags"))
    tags = {"Tags": tags_of(new)} if tags_of(new) and not old else {}
    arn = events.put_rule(Name=name, EventBusName=bus, **parameters, **tags)["RuleArn"]
    targets = new.get("Targets") or []
    gone = {target["Id"] for target in old.get("Targets") or []} - {target["Id"] for target in targets}
    if gone:
        events.remove_targets(Rule=name, EventBusName=bus, Ids=sorted(gone))
    if targets:
        answer = events.put_targets(
            **to_api("events", "PutTargets", {"Rule": name, "EventBusName": bus, "Targets": targets})
        )
        if answer.get("FailedEntryCount"):
            raise ValueError(
                f"target {answer['FailedEntries'][0]['TargetId']}: {answer['FailedEntries'][0]['ErrorMessage']}"
            )
    return str(arn)


def _update_rule(site: Site, physical_id: str, old: Properties, new: Properties) -> None:
    arn = _put_rule(site, *_bus_and_name(physical_id), old, new)
    _retag(site.client("events"), "ResourceARN", arn, old, new)


def _rule_exists(site: Site, physical_id: str) -> bool:
    bus, name = _bus_and_name(physical_id)
    return found(lambda: site.client("events").describe_rule(Name=name, EventBusName=bus))


def _delete_rule(site: Site, physical_id: str, properties: Properties) -> None:
    events = site.client("events")
    bus, name = _bus_and_name(physical_id)
    targets = [target["Id"] for target in properties.get("Targets") or []]
    if targets:
        ignore_missing(lambda: events.remove_targets(Rule=name, EventBusName=bus, Ids=targets))
    ignore_missing(lambda: events.delete_rule(Name=name, EventBusName=bus))


def _create_budget(site: Site, properties: Properties, generated: str) -> Created:
    budget = {"BudgetName": fit_name(generated, 100), **properties["Budget"]}
    converted = to_api(
        "budgets",
        "CreateBudget",
        {"NotificationsWithSubscribers": [], **properties, "Budget": budget},
        without=("ResourceTags",),
    )
    site.client("budgets").create_budget(AccountId=site.account, **converted)
    return Created(budget["BudgetName"])


def _budget_exists(site: Site, name: str) -> bool:
    return found(lambda: site.client("budgets").describe_budget(AccountId=site.account, BudgetName=name))


def _delete_budget(site: Site, name: str, properties: Properties) -> None:
    ignore_missing(lambda: site.client("budgets").delete_budget(AccountId=site.account, BudgetName=name))


def _update_budget(site: Site, name: str, old: Properties, new: Properties) -> None:
    # moto has no UpdateBudget; the name, by which everything finds a budget, stays.
    _delete_budget(site, name, old)
    _create_budget(site, {**new, "Budget": {**new["Budget"], "BudgetName": name}}, name)


def _dashboard_exists(site: Site, name: str) -> bool:
    return found(lambda: site.client("cloudwatch").get_dashboard(DashboardName=name)["DashboardBody"])


TYPES = (
    ResourceType(
        "AWS::Logs::LogGroup",
        _create_log_group,
        _log_group_exists,
        lambda site, name, properties: ignore_missing(lambda: site.client("logs").delete_log_group(logGroupName=name)),
        _update_log_group,
        ("LogGroupName",),
        "LogGroupName",
    ),
    ResourceType(
        "AWS::Logs::MetricFilter",
        _create_metric_filter,
        _metric_filter_exists,
        _delete_metric_filter,
        _update_metric_filter,
        ("LogGroupName", "FilterName"),
    ),
    put_type(
        "AWS::CloudWatch::Alarm",
        "cloudwatch",
        "PutMetricAlarm",
        name_property="AlarmName",
        attributes=_alarm_attributes,
        exists=lambda site, name: bool(site.client("cloudwatch").describe_alarms(AlarmNames=[name])["MetricAlarms"]),
        delete=lambda site, name: site.client("cloudwatch").delete_alarms(AlarmNames=[name]),
    ),
    put_type(
        "AWS::CloudWatch::Dashboard",
        "cloudwatch",
        "PutDashboard",
        name_property="DashboardName",
        exists=_dashboard_exists,
        delete=lambda site, name: site.client("cloudwatch").delete_dashboards(DashboardNames=[name]),
    ),
    ResourceType(
        "AWS::SNS::Topic",
        _create_topic,
        _topic_exists,
        lambda site, arn, properties: ignore_missing(lambda: site.client("sns").delete_topic(TopicArn=arn)),
        _update_topic,
        ("FifoTopic", "TopicName"),
        "TopicName",
    ),
    ResourceType(
        "AWS::SNS::TopicPolicy",
        _create_topic_policy,
        _topic_policy_exists,
        # The policy goes with its topic; AWS itself refuses to leave a topic without one.
        lambda site, physical_id, properties: None,
        _update_topic_policy,
    ),
    ResourceType(
        "AWS::SNS::Subscription",
        _subscribe,
        _subscription_exists,
        lambda site, arn, properties: ignore_missing(lambda: site.client("sns").unsubscribe(SubscriptionArn=arn)),
        _set_subscription,
        ("Endpoint", "Protocol", "Region", "TopicArn"),
    ),
    ResourceType(
        "AWS::SSM::Parameter",
        _create_parameter,
        _parameter_exists,
        lambda site, name, properties: ignore_missing(lambda: site.client("ssm").delete_parameter(Name=name)),
        _update_parameter,
        ("Name",),
        "Name",
    ),
    ResourceType(
        "AWS::Events::Rule", _create_rule, _rule_exists, _delete_rule, _update_rule, ("Name", "EventBusName"), "Name"
    ),
    ResourceType(
        "AWS::Budgets::Budget",
        _create_budget,
        _budget_exists,
        _delete_budget,
        _update_budget,
        ("Budget.BudgetName", "NotificationsWithSubscribers"),
    ),
)
