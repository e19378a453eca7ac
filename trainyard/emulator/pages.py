"""Answers in pages where moto gives them whole: who reads the first alone must miss what stands on the second."""

from typing import Any

from moto.cloudformation.responses import CloudFormationResponse
from moto.cloudwatch.responses import CloudWatchResponse
from moto.core.responses import ActionResult

_PAGES: tuple[tuple[Any, str, tuple[str, ...], int, str], ...] = (
    # The sizes are the API references': DescribeStackEvents, ListStackResources and ListStacks say 100 and take no
    # other, DescribeAlarms' MaxRecords is 50 where none is named, of both kinds of alarm together.
    (CloudFormationResponse, "describe_stack_events", ("StackEvents",), 100, ""),
    (CloudFormationResponse, "list_stack_resources", ("StackResourceSummaries",), 100, ""),
    (CloudFormationResponse, "list_stacks", ("StackSummaries",), 100, ""),
    (CloudWatchResponse, "describe_alarms", ("MetricAlarms", "CompositeAlarms"), 50, "MaxRecords"),
)


def install() -> None:
    """Page every answer of the table."""
    for response, method, keys, size, size_parameter in _PAGES:
        setattr(response, method, _paged(getattr(response, method), keys, size, size_parameter))


def _paged(whole: Any, keys: tuple[str, ...], size: int, size_parameter: str) -> Any:
    def page(self: Any) -> ActionResult:
        answer: dict[str, Any] = whole(self).result
        wanted = int((size_parameter and self._get_param(size_parameter)) or size)
        start = int(self._get_param("NextToken") or 0)
        items = [(key, item) for key in keys for item in answer[key]]
        shown = items[start : start + wanted]
        more = {"NextToken": str(start + wanted)} if len(items) > start + wanted else {}
        return ActionResult({**answer, **{key: [item for of, item in shown if of == key] for key in keys}, **more})

    return page
