"""From an operation to what it must be allowed: IAM actions, resource ARNs and condition keys.

A template stands for an ARN in the request's region and the account: `training-job/{TrainingJobName}` of
sagemaker is arn:aws:sagemaker:REGION:ACCOUNT:training-job/NAME. "*" is an action that AWS judges on no resource.
An operation that stands in no table is unmapped, and denied: the emulator must not be laxer than AWS.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.emulator.authorization.requests import AwsRequest


@dataclass(frozen=True)
class Check:
    """One thing that must be allowed for a request to pass."""

    action: str
    resource: str
    context: Mapping[str, Any] = field(default_factory=dict)
    """Condition keys, lower-case; values are text or lists of text."""

    @property
    def service(self) -> str:
        """The IAM prefix of the action."""
        return self.action.partition(":")[0]


class UnmappedError(Exception):
    """The authorizer can't tell what a request needs: denied, with this as the reason."""


_ANY = "*"


def _each(template: str, operations: str) -> dict[str, str]:
    """One template for several operations, named in one text."""
    return dict.fromkeys(operations.split(), template)


_RESOURCES: dict[str, dict[str, str]] = {
    "sagemaker": {
        **_each(
            "training-job/{TrainingJobName}",
            "CreateTrainingJob DescribeTrainingJob StopTrainingJob DeleteTrainingJob UpdateTrainingJob",
        ),
        **_each("={ResourceArn}", "AddTags ListTags DeleteTags"),
        **_each("model-package-group/{ModelPackageGroupName}", "CreateModelPackageGroup DescribeModelPackageGroup"),
        # A new version's number is AWS's to give: policies name all versions of a group.
        "CreateModelPackage": "model-package/{ModelPackageGroupName}/*",
        "ListModelPackages": "model-package/{ModelPackageGroupName|*}/*",
        **_each("={ModelPackageName}", "DescribeModelPackage"),
        **_each("={ModelPackageArn}", "UpdateModelPackage"),
        **_each(_ANY, "ListTrainingJobs SearchTrainingPlanOfferings"),
    },
    "logs": {
        **_each("log-group:{logGroupName}:log-stream:{logStreamName}", "GetLogEvents PutLogEvents DeleteLogStream"),
        # CloudWatch Logs asks of a group as of a stream without a name: its refusals say so, and by its API reference a
        # group's ARN stands in policies with `:*`.
        **_each(
            "log-group:{logGroupName}:log-stream:",
            "CreateLogStream DescribeLogStreams FilterLogEvents CreateLogGroup DeleteLogGroup PutRetentionPolicy "
            "DescribeMetricFilters PutMetricFilter",
        ),
        "DescribeLogGroups": "log-group:{logGroupNamePrefix}:log-stream:",
        "ListTagsForResource": "={resourceArn}",
    },
    "ssm": {
        **_each("parameter{/Name}", "GetParameter GetParameterHistory PutParameter DeleteParameter"),
        **_each("parameter{/Names}", "GetParameters DeleteParameters"),
        "GetParametersByPath": "parameter{/Path}",
        "DescribeParameters": _ANY,
    },
    "cloudformation": {
        **_each(
            "stack/{StackName}/*",
            "CreateChangeSet CreateStack DeleteChangeSet DeleteStack DescribeChangeSet DescribeStackEvents "
            "DescribeStackResource DescribeStackResources DescribeStacks DetectStackDrift ExecuteChangeSet "
            "GetStackPolicy GetTemplate ListChangeSets ListStackResources RollbackStack ContinueUpdateRollback "
            "UpdateStack UpdateTerminationProtection CancelUpdateStack DescribeEvents",
        ),
        **_each(
            _ANY,
            "GetTemplateSummary ListStacks ListExports ListImports ValidateTemplate DescribeStackDriftDetectionStatus",
        ),
    },
    "ecr": {
        "GetAuthorizationToken": _ANY,
        **_each(
            "repository/{repositoryName}",
            "BatchCheckLayerAvailability BatchGetImage CompleteLayerUpload DescribeImages GetDownloadUrlForLayer "
            "InitiateLayerUpload ListImages PutImage UploadLayerPart GetRepositoryPolicy ListTagsForResource "
            "DescribeImageScanFindings",
        ),
        "DescribeRepositories": "repository/{repositoryNames|*}",
    },
    "fsx": {
        # None of the three has a resource in the service authorization reference, though it is asked about named ones.
        **_each(_ANY, "DescribeFileSystems DescribeDataRepositoryAssociations DescribeDataRepositoryTasks"),
        "CreateDataRepositoryTask": "task/*",
        "ListTagsForResource": "={ResourceARN}",
    },
    "batch": {
        **_each(
            _ANY,
            "DescribeComputeEnvironments DescribeJobQueues DescribeJobDefinitions DescribeJobs "
            "DescribeSchedulingPolicies DescribeServiceEnvironments DescribeServiceJob ListJobs ListServiceJobs "
            "ListSchedulingPolicies GetJobQueueSnapshot",
        ),
        "SubmitServiceJob": "={jobQueue}",
        "TerminateServiceJob": "service-job/{jobId}",
    },
    "cloudwatch": _each(
        _ANY,
        "PutMetricData GetMetricData GetMetricStatistics ListMetrics DescribeAlarms DescribeAlarmsForMetric "
        "DescribeAlarmHistory GetDashboard ListDashboards",
    ),
    "sns": {
        **_each("={TopicArn}", "Publish GetTopicAttributes Subscribe ListSubscriptionsByTopic SetTopicAttributes"),
        "ListTopics": _ANY,
    },
    "events": {
        "DescribeRule": "rule/{Name}",
        "ListTargetsByRule": "rule/{Rule}",
        "ListRules": _ANY,
        "PutEvents": "event-bus/default",
    },
    "budgets": {"DescribeBudget": "budget/{BudgetName}", "DescribeBudgets": "budget/*"},
    "kms": {
        **_each(
            "key",
            "Decrypt Encrypt GenerateDataKey GenerateDataKeyWithoutPlaintext ReEncrypt DescribeKey CreateGrant "
            "ListGrants RevokeGrant GetKeyPolicy PutKeyPolicy GetKeyRotationStatus EnableKey DisableKey "
            "ScheduleKeyDeletion ListResourceTags ListKeyPolicies TagResource UntagResource UpdateKeyDescription "
            "EnableKeyRotation DisableKeyRotation RotateKeyOnDemand ListKeyRotations CancelKeyDeletion RetireGrant",
        ),
        **_each(_ANY, "ListKeys ListAliases CreateKey GenerateRandom"),
    },
    "iam": {
        **_each(
            "role",
            "GetRole GetRolePolicy ListRolePolicies ListAttachedRolePolicies PutRolePolicy DeleteRolePolicy "
            "AttachRolePolicy DetachRolePolicy UpdateAssumeRolePolicy CreateRole DeleteRole "
            "PutRolePermissionsBoundary DeleteRolePermissionsBoundary TagRole UntagRole ListRoleTags UpdateRole",
        ),
        **_each(
            "={PolicyArn}",
            "GetPolicy GetPolicyVersion ListPolicyVersions CreatePolicyVersion DeletePolicyVersion DeletePolicy",
        ),
        **_each(_ANY, "ListRoles ListPolicies GetAccountSummary"),
    },
    "lambda": {"Invoke": "function"},
    "sts": {"GetCallerIdentity": _ANY, "AssumeRole": "={RoleArn}"},
    "pricing": {"GetProducts": _ANY},
    "servicequotas": _each(_ANY, "GetServiceQuota ListServiceQuotas"),
    "ce": _each(_ANY, "GetCostAndUsage GetCostForecast"),
    "tag": _each(_ANY, "GetResources GetTagKeys GetTagValues"),
    "secretsmanager": _each("={SecretId}", "GetSecretValue DescribeSecret"),
}
_NO_REGION = frozenset({"budgets", "iam"})
_IAM_NAMES = {"kms:ReEncrypt": "ReEncryptFrom", "lambda:Invoke": "InvokeFunction"}
"""IAM's name of an operation, where it is another."""
_ALWAYS_ALLOWED = frozenset({"sts:GetCallerIdentity"})
"""AWS never denies these, whatever the policies say."""

RoleLookup = Callable[[str], str]
"""Role name to ARN: a role's path is part of its ARN but not of the requests that name it."""
KeyLookup = Callable[[str], str]
"""Key id, alias or ARN to key ARN."""


def checks_for(request: AwsRequest, account: str, role_arn: RoleLookup, key_arn: KeyLookup) -> list[Check]:
    """Everything that must be allowed for `request` (not S3's); UnmappedError where that can't be told."""
    action = f"{request.service}:{request.operation}"
    if action in _ALWAYS_ALLOWED:
        return []
    template = _template(request)
    _require_one_name(request)
    resources = _resources(request, template, account, role_arn, key_arn)
    context = _tags(request) | _SERVICE_CONTEXT.get(request.service, _no_context)(request)
    name = _IAM_NAMES.get(action, request.operation)
    checks = [Check(f"{request.service}:{name}", resource, context) for resource in resources]
    return checks + _implied(request, account, context, key_arn)


def _template(request: AwsRequest) -> str:
    if request.service == "ec2" and request.operation.startswith("Describe"):
        return _ANY
    known = _RESOURCES.get(request.service)
    if known is None:
        raise UnmappedError(f"the emulator's authorizer doesn't know the service {request.service!r}")
    if request.operation not in known:
        raise UnmappedError(
            f"the emulator's authorizer can't tell the resource of {request.service}:{request.operation or '?'}"
        )
    return known[request.operation]


def _resources(request: AwsRequest, template: str, account: str, role_arn: RoleLookup, key_arn: KeyLookup) -> list[str]:
    if template == _ANY:
        return ["*"]
    if request.service == "kms":
        return [_key_of(request, key_arn)]
    if template in ("role", "function"):
        is_new, name = request.operation == "CreateRole", request.text("RoleName")
        role = _new_role(request, account) if is_new else role_arn(name)
        return [role if template == "role" else _function_arn(request, account)]
    if template.startswith("={"):
        value = request.text(template[2:-1])
        if not value:
            raise UnmappedError(
                f"{request.service}:{request.operation} without {template[2:-1]}: the resource can't be told"
            )
        return [_own_arn(request, value, account)]
    if request.service == "cloudformation":
        return [_stack_arn(request, account)]
    region = "" if request.service in _NO_REGION else request.region
    start = f"arn:aws:{request.service}:{region}:{account}:"
    return [start + path for path in _fill(template, request)]


# An ARN has no second colon or slash-dot tricks in it: moto splits some at their last colon and takes what is there.
_ARN = re.compile(
    r"arn:aws:([a-z0-9-]+):([a-z0-9-]*):(\d{12}|aws|):(?:(?:secret|log-group|function):)?[^:*?\s]+(?::\*)?"
)


def _own_arn(request: AwsRequest, value: str, account: str) -> str:
    """The ARN, where it is one of this account, of the request's service and region."""
    match = _ARN.fullmatch(value)
    service = "iam" if request.operation == "AssumeRole" else request.service
    region = "" if service == "iam" else request.region
    if match is None or match[1] != service or match[2] != region or match[3] not in (account, "aws"):
        raise UnmappedError(
            f"{request.service}:{request.operation} of {value!r}: not an ARN of {service} in this account and region"
        )
    return value


_PATH = re.compile(r"/(?:[\w+=,.@-]+/)*")


def _new_role(request: AwsRequest, account: str) -> str:
    """The ARN that the role will have; one of that name with another path is moto's to refuse."""
    path, name = request.text("Path", "/"), request.text("RoleName")
    if not _PATH.fullmatch(path) or not name:
        raise UnmappedError(f"iam:CreateRole of {name!r} with path {path!r}: the resource can't be told")
    return f"arn:aws:iam::{account}:role{path}{name}"


def _function_arn(request: AwsRequest, account: str) -> str:
    given = request.text("FunctionName")
    arn = given if given.startswith("arn:") else f"arn:aws:lambda:{request.region}:{account}:function:{given}"
    return _own_arn(request, arn, account)


# A request names its resource once: of two names one would be judged and the other taken.
_RIVALS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sns": (("TopicArn", "TargetArn", "PhoneNumber"),),
    "logs": (("logGroupName", "logGroupIdentifier"), ("logGroupNamePrefix", "logGroupNamePattern")),
}
_ELSEWHERE = ("registryId", "EventBusName", "PolicyArns", "ProvidedContexts", "SerialNumber", "SourceIdentity")
"""Parameters that move a request to another resource, or limit its rights, in ways that are not judged here."""


_BUILDS_A_STACK = ("CreateStack", "UpdateStack", "CreateChangeSet")


def _require_one_name(request: AwsRequest) -> None:
    given = request.parameters
    for names in _RIVALS.get(request.service, ()):
        both = [name for name in names if given.get(name)]
        if len(both) > 1:
            raise UnmappedError(f"{request.service}:{request.operation} names its resource twice: {', '.join(both)}")
    odd = [name for name in _ELSEWHERE if given.get(name) or any(key.startswith(f"{name}.") for key in given)]
    entries = given.get("Entries")
    if request.service == "events" and any("EventBusName" in item for item in _dictionaries(entries)):
        odd.append("Entries.EventBusName")
    if request.service == "logs" and ("logGroupIdentifiers" in given or "logGroupNamePattern" in given):
        odd.append("logGroupIdentifiers or logGroupNamePattern")
    if request.operation in _BUILDS_A_STACK and request.service == "cloudformation" and not given.get("RoleARN"):
        raise UnmappedError("cloudformation without RoleARN: the emulator doesn't judge the resources by the caller")
    if request.protocol == "cbor" and request.operation == "PutMetricData":
        odd.append("a body in CBOR, which hides its namespace")
    if odd:
        raise UnmappedError(f"{request.service}:{request.operation} with {odd[0]}: the emulator doesn't judge it")


def _dictionaries(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


_PLACEHOLDER = re.compile(r"\{(/?)(\w+)(\|\*)?\}")


def _fill(template: str, request: AwsRequest) -> list[str]:
    """The template with the request's parameters in place; a list parameter gives one path for each item."""
    paths = [template]
    for slash, name, optional in _PLACEHOLDER.findall(template):
        value = request.parameters.get(name)
        if name.startswith("logGroup") and not value:
            value = request.parameters.get("logGroupIdentifier", "") if name == "logGroupName" else ""
            value = str(value).rpartition(":log-group:")[2].removesuffix(":*")
        values = [str(item) for item in value] if isinstance(value, list) else [str(value)] if value else []
        if not values:
            if not optional and name != "logGroupNamePrefix":
                raise UnmappedError(f"{request.service}:{request.operation} without {name}: which resource?")
            values = ["*" if optional else ""]
        if slash:  # an SSM parameter's name may or may not start with the slash that its ARN has; it may be an ARN
            values = [_parameter_name(request, item) for item in values]
        placeholder = "{" + slash + name + (optional or "") + "}"
        paths = [path.replace(placeholder, item) for path in paths for item in values]
    return paths


_PARAMETER = re.compile(
    r"(?:arn:aws:ssm:([a-z0-9-]+):\d{12}:parameter(?=/))?/?((?:[\w.-]+(?:/[\w.-]+)*)?)/?(?::[\w.-]+)?", re.ASCII
)


def _parameter_name(request: AwsRequest, given: str) -> str:
    """The part of a parameter's ARN after `parameter`, of a name, a path or an ARN with or without version."""
    match = _PARAMETER.fullmatch(given)
    if match is None or match[1] not in (None, request.region):
        raise UnmappedError(f"ssm:{request.operation} of {given!r}: not the name of a parameter in this region")
    return "/" + match[2]


def _stack_arn(request: AwsRequest, account: str) -> str:
    name, change_set = request.text("StackName"), request.text("ChangeSetName")
    given = name or change_set  # of two, the change set must be one of the stack: the engine sees to it
    if given.startswith("arn:"):
        return _own_arn(request, given, account)
    if not re.fullmatch(r"[A-Za-z0-9-]*", name):
        raise UnmappedError(f"cloudformation: {name!r} is not the name of a stack")
    return f"arn:aws:cloudformation:{request.region}:{account}:stack/{name or '*'}/*"


def _key_of(request: AwsRequest, key_arn: KeyLookup) -> str:
    given = request.text("KeyId") or request.text("ResourceId")
    if "CiphertextBlob" in request.parameters:
        # moto's ciphertext begins with the id of its key, as AWS's names its key within: that key does the work.
        named = given or request.text("SourceKeyId")
        try:
            given = base64.b64decode(request.text("CiphertextBlob"))[:36].decode("ascii")
        except ValueError:
            given = ""
        if named and key_arn(named) != key_arn(given):
            raise UnmappedError(f"kms:{request.operation}: the ciphertext is not one of key {named}")
    if not given:
        raise UnmappedError(f"kms:{request.operation} without KeyId: the key can't be told")
    return key_arn(given)


# ---- condition keys ---------------------------------------------------------------------------------------


def _no_context(request: AwsRequest) -> dict[str, Any]:
    return {}


def _tags(request: AwsRequest) -> dict[str, Any]:
    """aws:RequestTag/KEY and aws:TagKeys, from the usual forms in which requests carry tags."""
    given = request.parameters.get("Tags", request.parameters.get("tags"))
    pairs: list[tuple[str, str]] = []
    if isinstance(given, dict):
        pairs = [(str(key), str(value)) for key, value in given.items()]
    for tag in given if isinstance(given, list) else []:
        if isinstance(tag, dict):
            key = tag.get("Key", tag.get("TagKey", tag.get("key")))
            pairs.append((str(key), str(tag.get("Value", tag.get("TagValue", tag.get("value", ""))))))
    context: dict[str, Any] = {f"aws:requesttag/{key}".lower(): value for key, value in pairs}
    removed = request.parameters.get("TagKeys")
    keys = [key for key, _ in pairs] + ([str(key) for key in removed] if isinstance(removed, list) else [])
    if keys:
        context["aws:tagkeys"] = keys
    return context


def _flag(value: Any) -> str:
    return "true" if str(value).lower() == "true" else "false"


def _sagemaker(request: AwsRequest) -> dict[str, Any]:
    """The keys that the service authorization reference lists for CreateTrainingJob; absent ones stay absent."""
    parameters = request.parameters
    if request.operation in ("CreateModelPackage", "UpdateModelPackage") and parameters.get("ModelApprovalStatus"):
        return {"sagemaker:modelapprovalstatus": request.text("ModelApprovalStatus")}
    if request.operation != "CreateTrainingJob":
        return {}
    resources, vpc = parameters.get("ResourceConfig") or {}, parameters.get("VpcConfig") or {}
    groups = [group.get("InstanceType") for group in resources.get("InstanceGroups") or []]
    context: dict[str, Any] = {
        "sagemaker:instancetypes": [str(item) for item in [resources.get("InstanceType"), *groups] if item],
        "sagemaker:vpcsubnets": [str(item) for item in vpc.get("Subnets") or []],
        "sagemaker:vpcsecuritygroupids": [str(item) for item in vpc.get("SecurityGroupIds") or []],
        "sagemaker:outputkmskeyarn": (parameters.get("OutputDataConfig") or {}).get("KmsKeyId"),
        "sagemaker:volumekmskeyarn": resources.get("VolumeKmsKeyId"),
        "sagemaker:maxruntimeinseconds": (parameters.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds"),
        "sagemaker:networkisolation": _flag(parameters.get("EnableNetworkIsolation", False)),
        "sagemaker:intercontainertrafficencryption": _flag(
            parameters.get("EnableInterContainerTrafficEncryption", False)
        ),
        "sagemaker:enableremotedebug": _flag(
            (parameters.get("RemoteDebugConfig") or {}).get("EnableRemoteDebug", False)
        ),
        "sagemaker:keepaliveperiod": resources.get("KeepAlivePeriodInSeconds"),
    }
    systems = [
        (channel.get("DataSource") or {}).get("FileSystemDataSource")
        for channel in parameters.get("InputDataConfig") or []
    ]
    for system in [item for item in systems if item]:
        context["sagemaker:filesystemid"] = system.get("FileSystemId")
        context["sagemaker:filesystemtype"] = system.get("FileSystemType")
        context["sagemaker:filesystemaccessmode"] = system.get("FileSystemAccessMode")
        context["sagemaker:filesystemdirectorypath"] = system.get("DirectoryPath")
    return {
        key: value if isinstance(value, list) else str(value)
        for key, value in context.items()
        if value not in (None, "", [])
    }


def _kms(request: AwsRequest) -> dict[str, Any]:
    encryption = request.parameters.get("EncryptionContext") or {}
    context: dict[str, Any] = {f"kms:encryptioncontext:{key}".lower(): str(value) for key, value in encryption.items()}
    if encryption:
        context["kms:encryptioncontextkeys"] = sorted(encryption)
    if "GranteePrincipal" in request.parameters:
        context["kms:granteeprincipal"] = request.text("GranteePrincipal")
        context["kms:grantoperations"] = [str(item) for item in request.parameters.get("Operations") or []]
        context["kms:grantisforawsresource"] = "false"
    if request.text("KeyId").startswith("alias/"):
        context["kms:requestalias"] = request.text("KeyId")
    return context


def _sts(request: AwsRequest) -> dict[str, Any]:
    if request.parameters.get("Tags") or request.parameters.get("TransitiveTagKeys"):
        raise UnmappedError("sts:AssumeRole with session tags: the emulator doesn't keep session tags")
    names = {
        "sts:externalid": "ExternalId",
        "sts:rolesessionname": "RoleSessionName",
        "sts:sourceidentity": "SourceIdentity",
    }
    return {key: request.text(name) for key, name in names.items() if name in request.parameters}


def _iam(request: AwsRequest) -> dict[str, Any]:
    names = {"iam:policyarn": "PolicyArn", "iam:permissionsboundary": "PermissionsBoundary"}
    return {key: request.text(name) for key, name in names.items() if name in request.parameters}


def _cloudwatch(request: AwsRequest) -> dict[str, Any]:
    return {"cloudwatch:namespace": request.text("Namespace")} if "Namespace" in request.parameters else {}


def _cloudformation(request: AwsRequest) -> dict[str, Any]:
    names = {
        "cloudformation:changesetname": "ChangeSetName",
        "cloudformation:rolearn": "RoleARN",
        "cloudformation:templateurl": "TemplateURL",
    }
    return {key: request.text(name) for key, name in names.items() if name in request.parameters}


_SERVICE_CONTEXT: dict[str, Callable[[AwsRequest], dict[str, Any]]] = {
    "sagemaker": _sagemaker,
    "kms": _kms,
    "sts": _sts,
    "iam": _iam,
    "cloudwatch": _cloudwatch,
    "cloudformation": _cloudformation,
}


# ---- what a request needs besides its own action ----------------------------------------------------------


def _implied(request: AwsRequest, account: str, context: Mapping[str, Any], key_arn: KeyLookup) -> list[Check]:
    parameters = request.parameters
    if request.service == "sagemaker" and request.operation == "CreateTrainingJob":
        arn = f"arn:aws:sagemaker:{request.region}:{account}:training-job/{request.text('TrainingJobName')}"
        passed = {"iam:passedtoservice": "sagemaker.amazonaws.com", "iam:associatedresourcearn": arn}
        checks = [Check("iam:PassRole", request.text("RoleArn"), passed)]
        if parameters.get("Tags"):
            checks.append(Check("sagemaker:AddTags", arn, {**context, "sagemaker:taggingaction": "CreateTrainingJob"}))
        return checks
    if request.operation == "CreateRole" and parameters.get("Tags"):
        return [Check("iam:TagRole", _new_role(request, account), context)]
    if request.service == "sagemaker" and request.operation == "CreateModelPackageGroup" and parameters.get("Tags"):
        arn = (
            f"arn:aws:sagemaker:{request.region}:{account}:model-package-group/{request.text('ModelPackageGroupName')}"
        )
        return [Check("sagemaker:AddTags", arn, {**context, "sagemaker:taggingaction": "CreateModelPackageGroup"})]
    if request.service == "batch" and request.operation == "SubmitServiceJob":
        return _queued(request, account, context)
    if request.service == "cloudformation" and parameters.get("RoleARN"):
        return [Check("iam:PassRole", request.text("RoleARN"), {"iam:passedtoservice": "cloudformation.amazonaws.com"})]
    encrypts = request.service == "kms" and request.operation == "ReEncrypt"
    return [Check("kms:ReEncryptTo", key_arn(request.text("DestinationKeyId")), context)] if encrypts else []


def _queued(request: AwsRequest, account: str, context: Mapping[str, Any]) -> list[Check]:
    """A job in a queue: its share and the job itself are judged too, and the role that it hands over."""
    new = f"arn:aws:batch:{request.region}:{account}:service-job/*"
    checks = [Check("batch:SubmitServiceJob", new, context)]
    if request.text("quotaShareName"):
        share = f"{request.text('jobQueue')}/quota-share/{request.text('quotaShareName')}"
        checks.append(Check("batch:SubmitServiceJob", share, context))
    if request.parameters.get("tags"):
        checks.append(Check("batch:TagResource", new, context))
    try:
        role = str(json.loads(request.text("serviceRequestPayload"))["RoleArn"])
    except (ValueError, KeyError, TypeError):
        raise UnmappedError(
            "batch:SubmitServiceJob: its payload names no role, which the caller must be allowed to pass"
        ) from None
    return [*checks, Check("iam:PassRole", role, {"iam:passedtoservice": "sagemaker.amazonaws.com"})]
