"""The templates of two tenants, and ways to find and change what stands in them."""

from collections.abc import Callable
from typing import Any

from trainyard.isolation.templates import Deployment

Templates = dict[str, dict[str, Any]]
Mistake = Callable[[Templates, Deployment], None]
FOUNDATION, TRAINING = "trainyard-local-acme-foundation", "trainyard-local-acme-training"
OTHER, OTHERS_TRAINING = "trainyard-local-globex-foundation", "trainyard-local-globex-training"
PLATFORM, STRANGER = "trainyard-local-platform", "999999999999"


def logical_id(templates: Templates, stack: str, kind: str, beginning: str = "") -> str:
    resources = templates[stack]["Resources"].items()
    return str(next(name for name, item in resources if item["Type"] == f"AWS::{kind}" and name.startswith(beginning)))


def resource(templates: Templates, stack: str, kind: str, beginning: str = "") -> dict[str, Any]:
    found: dict[str, Any] = templates[stack]["Resources"][logical_id(templates, stack, kind, beginning)]["Properties"]
    return found


def add(templates: Templates, stack: str, kind: str, **properties: Any) -> None:
    templates[stack]["Resources"]["Added"] = {"Type": f"AWS::{kind}", "Properties": properties}


def others(names: Deployment, kind: str, beginning: str = "", stack: str = OTHER) -> str:
    return names.physical_id(stack, logical_id(dict(names.templates), stack, kind, beginning))


def others_arn(names: Deployment, kind: str, beginning: str = "", stack: str = OTHER) -> str:
    return names.arn(stack, logical_id(dict(names.templates), stack, kind, beginning))
