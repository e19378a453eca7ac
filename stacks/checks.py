"""What every template must pass before it is deployed, by one mechanism: the CDK's own validation.

Enforced: the CDK's template rules, our Guard rules (`rules/`), and cdk-nag's packs AwsSolutions and NIST 800-53 R5.
A finding is mended, or acknowledged with a reason beside the construct that it is about (`constructs/acknowledged`).
HIPAA and PCI DSS are reports: what they ask for is partly the account's and the organization's to give.
"""

import json
from pathlib import Path
from typing import Any

from aws_cdk import App, CloudFormationValidatePlugin, ValidationRuleSource, Validations
from cdk_nag import AwsSolutionsChecks, HIPAASecurityChecks, NagPack, NIST80053R5Checks, PCIDSS321Checks

from trainyard.spec.platform import EnvironmentSpec

RULES = Path(__file__).parent / "rules"


def enforce_checks(app: App, environment: EnvironmentSpec) -> None:
    """Let `app.synth()` fail on any finding that nobody has acknowledged."""
    sources = ["tenant", *(["retained"] if environment.retain_data else [])]
    rules = [ValidationRuleSource(name=name, content=(RULES / f"{name}.guard").read_text()) for name in sources]
    Validations.of(app).add_plugins(
        CloudFormationValidatePlugin(guard_rules=rules), AwsSolutionsChecks(app), NIST80053R5Checks(app)
    )


def findings(assembly: Path, at_most: int = 3) -> str:
    """What made `app.synth()` fail, for a line on the terminal: the first few, and where the rest is."""
    report = assembly / "validation-report.json"
    content = json.loads(report.read_text(encoding="utf-8"))
    listed = [
        (violation.get("severity"), f"{violation['ruleName']} at {_where(place)} ({violation['description'][:160]})")
        for plugin in content["pluginReports"]
        if plugin["conclusion"] == "failure"
        for violation in plugin["violations"]
        for place in violation["violatingConstructs"]
    ]
    found = [text for severity, text in listed if severity not in {"warning", "info"}] or [text for _, text in listed]
    more = f"; and {len(found) - at_most} more" if len(found) > at_most else ""
    return (
        f"{'; '.join(found[:at_most])}{more}; mend them, or acknowledge one with its reason beside its construct "
        f"(stacks/constructs/acknowledged.py); all of them are in {report}"
    )


def _where(place: dict[str, Any]) -> str:
    """A finding's construct, or its resource where a rule looks at templates alone."""
    return str(place.get("constructPath") or place.get("cloudFormationResource", {}).get("logicalId") or "the template")


def write_reports(app: App, folder: Path) -> dict[str, int]:
    """What HIPAA and PCI DSS 3.2.1 find, as JSON files in `folder`; the number of findings by pack."""
    folder.mkdir(parents=True, exist_ok=True)
    packs: dict[str, NagPack] = {"hipaa": HIPAASecurityChecks(app), "pci-dss-3.2.1": PCIDSS321Checks(app)}
    numbers = {}
    for name, pack in packs.items():
        found = [
            {
                "rule": violation.rule_name,
                "description": violation.description,
                "resources": sorted(str(item.construct_path) for item in violation.violating_resources),
            }
            for violation in pack.validate_scope(app).violations
        ]
        found.sort(key=lambda item: str(item["rule"]))
        (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        numbers[name] = sum(len(item["resources"]) for item in found)
    return numbers
