"""The decision on one check, and the sentence that explains a denial, worded like AWS's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ministack.core.iam_evaluator import (
    _CONDITION_OPS,
    EvalContext,
    ParsedStatement,
    combine_resource_policy,
    evaluate,
    evaluate_resource_policy,
    fnmatch_iam,
)

from trainyard.emulator.authorization.actions import Check
from trainyard.emulator.authorization.policies import (
    PolicyError,
    ResourcePolicies,
    as_text,
    boundary_document,
    parsed,
    role_documents,
    sound_resource_policy,
    with_variables,
)
from trainyard.emulator.authorization.principals import Principal, Principals


def _resource_decides(check: Check) -> bool:
    """Whether the resource's own policy must allow, even within its account: a key's policy, a role's trust."""
    return check.action == "sts:AssumeRole" or (check.service == "kms" and check.resource != "*")


# Keys whose value here is AWS's: filled in for every request, or rightly absent on loopback and without an
# organization, MFA, federation or session tags. No other key of aws: can be judged.
_GLOBAL_KEYS = """
principalarn principalaccount principaltype currenttime epochtime requestedregion securetransport sourceip sourcevpc
sourcevpce vpcsourceip sourceaccount sourcearn tagkeys resourceaccount principalisawsservice principalservicename
principalservicenameslist viaawsservice principalorgid principalorgpaths resourceorgid resourceorgpaths sourceorgid
userid username multifactorauthpresent multifactorauthage federatedprovider sourceidentity
"""
_KNOWN_GLOBAL_KEYS = frozenset(f"aws:{name}" for name in _GLOBAL_KEYS.split())
_KNOWN_KEY_FAMILIES = ("aws:requesttag/", "aws:principaltag/")

# Keys of services, and the actions for which they are filled in whenever the request has a value for them.
_OBJECT_WRITES = "s3:PutObject*"
_JOB_KEYS = """
instancetypes vpcsubnets vpcsecuritygroupids outputkmskeyarn volumekmskeyarn maxruntimeinseconds networkisolation
intercontainertrafficencryption enableremotedebug keepaliveperiod filesystemid filesystemtype filesystemaccessmode
filesystemdirectorypath
"""
_FILLED_IN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["s3:signatureversion", "s3:authtype", "s3:resourceaccount"], ("s3:*",)),
    **dict.fromkeys(["s3:prefix", "s3:delimiter", "s3:max-keys"], ("s3:List*",)),
    "s3:versionid": ("s3:*ObjectVersion*",),
    **dict.fromkeys(
        [
            "s3:x-amz-server-side-encryption",
            "s3:x-amz-server-side-encryption-aws-kms-key-id",
            "s3:x-amz-acl",
            "s3:x-amz-storage-class",
        ],
        (_OBJECT_WRITES,),
    ),
    **dict.fromkeys(
        [
            "kms:viaservice",
            "kms:calleraccount",
            "kms:encryptioncontextkeys",
            "kms:granteeprincipal",
            "kms:grantoperations",
            "kms:grantisforawsresource",
            "kms:requestalias",
        ],
        ("kms:*",),
    ),
    "iam:passedtoservice": ("iam:PassRole",),
    "iam:associatedresourcearn": ("iam:PassRole",),
    "iam:policyarn": ("iam:AttachRolePolicy", "iam:DetachRolePolicy"),
    "iam:permissionsboundary": ("iam:CreateRole", "iam:PutRolePermissionsBoundary", "iam:PutRolePolicy"),
    **dict.fromkeys(["sts:externalid", "sts:rolesessionname", "sts:sourceidentity"], ("sts:AssumeRole",)),
    "cloudwatch:namespace": ("cloudwatch:PutMetricData",),
    **dict.fromkeys(
        ["cloudformation:changesetname", "cloudformation:rolearn", "cloudformation:templateurl"], ("cloudformation:*",)
    ),
    **dict.fromkeys(
        [f"sagemaker:{name}" for name in _JOB_KEYS.split()],
        ("sagemaker:CreateTrainingJob",),
    ),
    "sagemaker:taggingaction": ("sagemaker:AddTags",),
    "sagemaker:modelapprovalstatus": ("sagemaker:CreateModelPackage", "sagemaker:UpdateModelPackage"),
}
_FILLED_IN_FAMILIES = {
    "kms:encryptioncontext:": "kms:*",
    "s3:requestobjecttag/": _OBJECT_WRITES,
    "aws:resourcetag/": "batch:T*",  # TerminateServiceJob, TagResource
}


def _is_filled_in(key: str, context: EvalContext) -> bool:
    """Whether the absence of a condition key means that the request has none, and its value is the request's."""
    lower = key.lower()
    if context.service_context.get(lower) is not None or lower in _KNOWN_GLOBAL_KEYS:
        return True
    if lower.startswith(_KNOWN_KEY_FAMILIES):
        return True
    families = [actions for start, actions in _FILLED_IN_FAMILIES.items() if lower.startswith(start)]
    return any(fnmatch_iam(context.action, pattern) for pattern in (*_FILLED_IN.get(lower, ()), *families))


@dataclass(frozen=True)
class Denial:
    """Why a check failed."""

    check: Check
    message: str


class Judge:
    """Decides checks by the deployed policies."""

    def __init__(self, principals: Principals) -> None:
        self._principals = principals
        self._resource_policies = ResourcePolicies(principals.account)

    def deny(self, principal: Principal, check: Check, region: str) -> Denial | None:
        """The denial of `check` to `principal`, or None when it is allowed."""
        try:
            reason = self._reason_to_deny(principal, check, region)
        except PolicyError as error:
            reason = f"because a policy can't be judged by the emulator: {error}"
        if reason is None:
            return None
        subject = (
            f"User: {principal.session_arn} is not authorized to perform: {check.action} on resource: {check.resource}"
        )
        return Denial(check, f"{subject} {reason}")

    def _reason_to_deny(self, principal: Principal, check: Check, region: str) -> str | None:
        context = self._context(principal, check, region)
        trust_or_policy = self._resource_policy(check)
        if principal.is_root:
            return self._root_reason(check, context, trust_or_policy)
        variables = _variables(context)
        documents = [with_variables(text, variables) for text in role_documents(principal.role)]
        identity = [_judgeable(parsed(text), context) for text in documents]
        limits = [
            [_judgeable(statements, context) for statements in layer] for layer in self._limits(principal, variables)
        ]
        own = evaluate(context, identity, *limits)
        if trust_or_policy is None and not _resource_decides(check):
            return None if own.decision == "Allow" else _identity_reason(context, identity, limits, check.action)
        policy = (
            sound_resource_policy(with_variables(trust_or_policy, variables)) if trust_or_policy else {"Statement": []}
        )
        policy = _judgeable_policy(policy, context)
        required = _resource_decides(check)
        decision = combine_resource_policy(
            own, context, policy, principal.account, required=required, limits=tuple(limits)
        )
        if decision.decision == "Allow":
            return None
        return self._combined_reason(context, identity, limits, policy, check, required)

    def _root_reason(self, check: Check, context: EvalContext, trust: str | None) -> str | None:
        # The root is the deployer here: all is allowed, but a role is assumed only by whom it trusts.
        if check.action != "sts:AssumeRole":
            return None
        policy = _judgeable_policy(sound_resource_policy(trust) if trust else {"Statement": []}, context)
        allowed = evaluate_resource_policy(policy, context).decision == "Allow"
        return None if allowed else "because the role's trust policy does not allow the sts:AssumeRole action"

    def _resource_policy(self, check: Check) -> str | None:
        if check.action == "sts:AssumeRole":
            role = self._principals.role(check.resource)
            return as_text(role.assume_role_policy_document) if role is not None else None
        return self._resource_policies.of(check.service, check.resource)

    def _limits(self, principal: Principal, variables: Mapping[str, Any]) -> list[list[list[ParsedStatement]]]:
        limits = []
        boundary = boundary_document(principal.role, self._principals.managed_policies())
        if boundary is not None:
            limits.append([parsed(with_variables(boundary, variables))])
        if principal.session_policy:
            limits.append([parsed(with_variables(principal.session_policy, variables))])
        return limits

    def _context(self, principal: Principal, check: Check, region: str) -> EvalContext:
        keys: dict[str, Any] = {
            "aws:principalisawsservice": "false",
            "aws:viaawsservice": "false",
            "aws:principaltype": "Account" if principal.is_root else "AssumedRole",
            "aws:tagkeys": None,
            **check.context,
        }
        if check.service == "kms":
            keys["kms:calleraccount"] = principal.account
        if check.action == "iam:PutRolePolicy":  # of the role as it is: the request names none
            role = self._principals.role(check.resource)
            keys["iam:permissionsboundary"] = role.permissions_boundary_arn if role is not None else None
        if not principal.is_root:
            keys["aws:userid"] = f"{principal.role.id}:{principal.session_name}"
            for tag in principal.role.tags or []:
                keys[f"aws:principaltag/{tag['Key']}".lower()] = str(tag["Value"])
        return EvalContext(
            principal_arn=principal.arn,
            principal_type="Root" if principal.is_root else "AssumedRole",
            principal_account=principal.account,
            action=check.action,
            resource_arn=check.resource,
            region=region,
            source_ip="127.0.0.1",
            secure_transport=True,  # loopback carries no TLS, and needs none; policies mean the wire
            service_context=keys,
        )

    def _combined_reason(
        self,
        context: EvalContext,
        identity: list[list[ParsedStatement]],
        limits: list[list[list[ParsedStatement]]],
        policy: dict[str, Any],
        check: Check,
        required: bool,
    ) -> str:
        by_resource = evaluate_resource_policy(policy, context).decision
        if by_resource == "Deny":
            return "with an explicit deny in a resource-based policy"
        own = _identity_reason(context, identity, limits, check.action)
        if own.startswith("with") or not required or by_resource == "Allow":
            return own
        if check.action == "sts:AssumeRole":
            return "because the role's trust policy does not allow the sts:AssumeRole action"
        return f"because no resource-based policy allows the {check.action} action"


def _variables(context: EvalContext) -> dict[str, Any]:
    return {
        **context.service_context,
        "aws:principalarn": context.principal_arn,
        "aws:principalaccount": context.principal_account,
    }


def _identity_reason(
    context: EvalContext, identity: list[list[ParsedStatement]], limits: list[list[list[ParsedStatement]]], action: str
) -> str:
    """Which identity-side policy refuses; empty when none does."""
    if evaluate(context, identity).decision == "Deny":
        return "with an explicit deny in an identity-based policy"
    for layer in limits:
        if evaluate(context, layer).decision == "Deny":
            return "with an explicit deny in a permissions boundary"
    if evaluate(context, identity).decision != "Allow":
        return f"because no identity-based policy allows the {action} action"
    for layer in limits:
        if evaluate(context, layer).decision != "Allow":
            return f"because no permissions boundary allows the {action} action"
    return ""


def _judgeable_policy(policy: Mapping[str, Any], context: EvalContext) -> dict[str, Any]:
    """The resource policy without the Allows that can't be judged; PolicyError for such a Deny on the caller."""
    kept = []
    for statement in policy["Statement"]:
        plain = {"Statement": [{key: value for key, value in statement.items() if key != "Condition"}]}
        if evaluate_resource_policy(plain, context).decision == "ImplicitDeny":
            continue  # another principal's, action's or resource's: it decides nothing
        if _judgeable(parsed(json.dumps({"Statement": [statement]})), context):
            kept.append(statement)
    return {**policy, "Statement": kept}


def _judgeable(statements: list[ParsedStatement], context: EvalContext) -> list[ParsedStatement]:
    """The statements that can be judged on this request.

    An Allow with a condition on a key that is not filled in here, or with an unknown operator, does not match; a
    Deny is a PolicyError if it is about this action and resource: it might have kept the request out.
    """
    kept = []
    for statement in statements:
        reason = _why_unjudgeable(statement, context)
        if not reason:
            kept.append(statement)
        elif evaluate(context, [[replace(statement, conditions={})]]).decision == "Deny":
            raise PolicyError(reason)
    return kept


def _why_unjudgeable(statement: ParsedStatement, context: EvalContext) -> str:
    for operator, keys in (statement.conditions or {}).items():
        plain = operator.lower().removeprefix("forallvalues:").removeprefix("foranyvalue:").removesuffix("ifexists")
        if plain not in _CONDITION_OPS and plain != "null":
            return f"the condition operator {operator} is not known"
        for key in keys:
            if not _is_filled_in(key, context):
                return f"the condition key {key} of a {statement.effect} statement is not known"
    return ""
