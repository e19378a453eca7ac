"""What services take of a thing at most, where a deployment would meet it and neither moto nor the SDK's shapes say so.

Of quotas that AWS raises on request it is the one that an account has by default.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from moto.awslambda.exceptions import InvalidParameterValueException
from moto.awslambda.models import LambdaBackend
from moto.budgets.models import BudgetsBackend
from moto.cloudwatch.exceptions import ValidationError as AlarmError
from moto.cloudwatch.models import CloudWatchBackend
from moto.core.exceptions import JsonRESTError
from moto.events.exceptions import ValidationException as EventsError
from moto.events.models import EventsBackend
from moto.iam.exceptions import LimitExceededException
from moto.iam.models import IAMBackend
from moto.ssm.exceptions import ValidationException as ParameterError
from moto.ssm.models import SimpleSystemManagerBackend

# IAM and STS quotas (IAM user guide); white space doesn't count.
MANAGED_POLICY_CHARACTERS = 6_144
INLINE_CHARACTERS_OF_A_ROLE = 10_240
TRUST_CHARACTERS = 2_048
MANAGED_POLICIES_OF_A_ROLE = 10
# Parameter tiers (Systems Manager user guide).
PARAMETER_BYTES: Mapping[str, int] = {"Standard": 4_096, "Advanced": 8_192, "Intelligent-Tiering": 8_192}
# Lambda quotas, and the variables that its runtime sets (Lambda developer guide).
FUNCTION_SECONDS = 900
FUNCTION_VARIABLES_BYTES = 4_096
RESERVED_VARIABLES = frozenset(
    {
        "AWS_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_DEFAULT_REGION",
        "AWS_EXECUTION_ENV",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
        "AWS_LAMBDA_FUNCTION_NAME",
        "AWS_LAMBDA_FUNCTION_VERSION",
        "AWS_LAMBDA_INITIALIZATION_TYPE",
        "AWS_LAMBDA_LOG_GROUP_NAME",
        "AWS_LAMBDA_LOG_STREAM_NAME",
        "AWS_LAMBDA_RUNTIME_API",
        "AWS_REGION",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "LAMBDA_RUNTIME_DIR",
        "LAMBDA_TASK_ROOT",
        "_HANDLER",
    }
)
# EventBridge quotas; and of a rate its guide: one is minute, hour or day, more are plural.
TARGETS_OF_A_RULE = 5
_RATE = re.compile(r"rate\((1 (minute|hour|day)|([2-9]|[1-9]\d+) (minutes|hours|days))\)")
# AWS Budgets' API reference, Notification: of a threshold one topic and so many addresses are told.
BUDGET_ADDRESSES, BUDGET_TOPICS = 10, 1
# CloudWatch: PutMetricAlarm's API reference.
ALARM_QUERIES = 10
ALARM_SECONDS, ALARM_SECONDS_BY_THE_HOUR = 86_400, 7 * 86_400


def install() -> None:
    """Hold every service to its limits."""
    _limit_policies()
    _limit_parameters()
    _limit_functions()
    _limit_rules()
    _limit_alarms_and_budgets()


def _before(backend: Any, method: str, check: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Let `check` see every call of a backend's method first, its arguments by their names, and refuse it."""
    original = getattr(backend, method)
    signature = inspect.signature(original)

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        check(self, given.arguments)
        return original(self, *args, **kwargs)

    setattr(backend, method, checked)


def _characters(document: str) -> int:
    return len(re.sub(r"\s", "", document))


def _limit_policies() -> None:
    def trust(iam: Any, given: Mapping[str, Any]) -> None:
        document = given.get("assume_role_policy_document") or given["policy_document"]
        if _characters(document) > TRUST_CHARACTERS:
            raise LimitExceededException(f"Cannot exceed quota for ACLSizePerRole: {TRUST_CHARACTERS}")

    def inline(iam: Any, given: Mapping[str, Any]) -> None:
        role = given["role_name"]
        after = {**iam.get_role(role).policies, given["policy_name"]: given["policy_json"]}
        if sum(map(_characters, after.values())) > INLINE_CHARACTERS_OF_A_ROLE:
            raise LimitExceededException(
                f"Maximum policy size of {INLINE_CHARACTERS_OF_A_ROLE} bytes exceeded for role {role}"
            )

    def managed(iam: Any, given: Mapping[str, Any]) -> None:
        if _characters(given["policy_document"]) > MANAGED_POLICY_CHARACTERS:
            raise LimitExceededException(f"Cannot exceed quota for PolicySize: {MANAGED_POLICY_CHARACTERS}")

    def attached(iam: Any, given: Mapping[str, Any]) -> None:
        if len({*iam.get_role(given["role_name"]).managed_policies, given["policy_arn"]}) > MANAGED_POLICIES_OF_A_ROLE:
            raise LimitExceededException(f"Cannot exceed quota for PoliciesPerRole: {MANAGED_POLICIES_OF_A_ROLE}")

    _before(IAMBackend, "create_role", trust)
    _before(IAMBackend, "update_assume_role_policy", trust)
    _before(IAMBackend, "put_role_policy", inline)
    _before(IAMBackend, "create_policy", managed)
    _before(IAMBackend, "create_policy_version", managed)
    _before(IAMBackend, "attach_role_policy", attached)


def _limit_parameters() -> None:
    def put(ssm: Any, given: Mapping[str, Any]) -> None:
        kind = given["tier"] or "Standard"
        if len(given["value"].encode()) > PARAMETER_BYTES.get(kind, 0):
            raise ParameterError(
                f"{kind} tier parameters support a maximum parameter value of {PARAMETER_BYTES.get(kind)} characters."
            )

    _before(SimpleSystemManagerBackend, "put_parameter", put)


def _limit_functions() -> None:
    def judge(configuration: Mapping[str, Any]) -> None:
        seconds = int(configuration.get("Timeout") or 3)
        if seconds > FUNCTION_SECONDS:
            raise InvalidParameterValueException(
                f"Value '{seconds}' at 'timeout' failed to satisfy constraint: Member must have value less than or "
                f"equal to {FUNCTION_SECONDS}"
            )
        variables = (configuration.get("Environment") or {}).get("Variables") or {}
        reserved = sorted(RESERVED_VARIABLES & set(variables))
        why = "Lambda was unable to configure your environment variables because the environment variables you have "
        if reserved:
            raise InvalidParameterValueException(
                f"{why}provided contains reserved keys that are currently not supported for modification. Reserved "
                f"keys used in this request: {', '.join(reserved)}"
            )
        if sum(len(str(text).encode()) for item in variables.items() for text in item) > FUNCTION_VARIABLES_BYTES:
            raise InvalidParameterValueException(f"{why}provided exceeded the 4KB limit.")

    _before(LambdaBackend, "create_function", lambda _, given: judge(given["spec"]))
    _before(LambdaBackend, "update_function_configuration", lambda _, given: judge(given["body"]))


def _limit_rules() -> None:
    def rule(events: Any, given: Mapping[str, Any]) -> None:
        schedule = given["scheduled_expression"] or ""
        if schedule.startswith("rate(") and not _RATE.fullmatch(schedule):
            raise EventsError("Parameter ScheduleExpression is not valid.")

    def targets(events: Any, given: Mapping[str, Any]) -> None:
        known = events._get_event_bus(events._normalize_event_bus_arn(given["event_bus_arn"])).rules.get(given["name"])
        there = {target["Id"] for target in (known.targets if known else [])}
        if len(there | {target["Id"] for target in given["targets"]}) > TARGETS_OF_A_RULE:
            raise JsonRESTError("LimitExceededException", "The requested resource exceeds the maximum number allowed.")

    _before(EventsBackend, "put_rule", rule)
    _before(EventsBackend, "put_targets", targets)


def _limit_alarms_and_budgets() -> None:
    def alarm(watch: Any, given: Mapping[str, Any]) -> None:
        queries = given["metric_data_queries"] or []
        if any("SEARCH(" in (query.expression or "").upper() for query in queries):
            raise AlarmError("SEARCH is not supported on Metric Alarms.")
        if len(queries) > ALARM_QUERIES:
            raise AlarmError(f"An alarm based on a metric math expression can have at most {ALARM_QUERIES} metrics.")
        periods = [int(query.metric_stat.period) for query in queries if query.metric_stat is not None]
        period, times = max([int(given["period"] or 0), *periods]), int(given["evaluation_periods"] or 1)
        longest = ALARM_SECONDS_BY_THE_HOUR if period >= 3600 else ALARM_SECONDS
        if period * times > longest:
            raise AlarmError(
                f"Metrics cannot be checked across more than {longest} seconds (EvaluationPeriods * Period)"
            )

    def budget(budgets: Any, given: Mapping[str, Any]) -> None:
        for notification in given["notifications"] or []:
            kinds = [subscriber["SubscriptionType"] for subscriber in notification.get("Subscribers", [])]
            for kind, limit in (("EMAIL", BUDGET_ADDRESSES), ("SNS", BUDGET_TOPICS)):
                if kinds.count(kind) > limit:
                    raise JsonRESTError(
                        "CreationLimitExceededException", f"A notification can have at most {limit} {kind} subscribers."
                    )

    _before(CloudWatchBackend, "put_metric_alarm", alarm)
    _before(BudgetsBackend, "create_budget", budget)
