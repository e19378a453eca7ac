"""The proof for people: a few lines for a terminal, one page for an auditor."""

from collections.abc import Iterator, Sequence
from html import escape

from trainyard.isolation.mutants import Survey
from trainyard.isolation.places import Wire
from trainyard.isolation.proof import Finding, Proof
from trainyard.spec.words import counted

_LISTS = (
    ("allowed_cross_tenant", "Allowed across tenants", "Requests that touch another tenant or the shared platform."),
    ("denied_own", "Denied to the owner", "Requests that a tenant's own work needs."),
    ("open_guard_rails", "Open guard-rails", "What no tenant's role may do even to its own."),
)

_WIRES = ("Wired to others", "What a tenant's resources are connected with, or let in, that isn't the tenant's own.")

_LIMITS = (
    "Evaluated offline from the synthesized templates, by this project's own evaluator of IAM policies; the tests "
    "compare it with a second, independent one. Neither is AWS.",
    "Service control and session policies are not modelled: both can only take rights away. Credentials of people and "
    "of CI that are no tenant's roles are the account's own matter.",
    "Figures are not held apart: a job's log line can add to a metric of another tenant, and so ring its alarms.",
    "In an attack, every condition key that the request doesn't state is taken to be the caller's choice.",
)


def lines(proof: Proof, survey: Survey | None = None) -> Iterator[str]:
    """The terminal's lines."""
    yield (
        f"{proof.environment}: {counted(proof.tenants, 'tenant')}, {counted(proof.pairs, 'pair')}, "
        f"{counted(proof.requests, 'request')}: "
        f"{'isolated, and every tenant can do its work' if proof.holds else 'NOT PROVEN'}"
    )
    for name, title, _ in _LISTS:
        findings: Sequence[Finding] = getattr(proof, name)
        yield f"{title}: {len(findings)}"
        yield from (f"  {finding}" for finding in findings)
    yield f"{_WIRES[0]}: {len(proof.foreign_wires)}"
    yield from (f"  {wire}" for wire in proof.foreign_wires)
    if proof.unknown_keys:
        yield f"Condition keys that nobody has stated: {', '.join(proof.unknown_keys)}"
    yield f"Listings that IAM can't scope to a tenant (names show, contents don't): {len(proof.unscopable)}"
    yield from (f"  {item}" for item in proof.unscopable)
    if survey is not None:
        yield from _survey_lines(survey)
    yield "Seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in proof.seconds.items())


def _survey_lines(survey: Survey) -> Iterator[str]:
    yield (
        f"Mutants of {survey.tenant}'s policies: {len(survey.verdicts)}, caught {len(survey.caught)}, "
        f"survivors {len(survey.survivors)}"
    )
    yield from (f"  {verdict.mutant}: {verdict.reason}" for verdict in survey.survivors)


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.holds { color: #1a7f37; } .fails { color: #cf222e; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #8884; }
td { overflow-wrap: anywhere; } .scroll { overflow-x: auto; } .number { font-size: 1.4rem; font-weight: 600; }
.facts { display: flex; flex-wrap: wrap; gap: 2rem; } .facts div { min-width: 7rem; }
"""


def page(proof: Proof, survey: Survey | None = None) -> str:
    """One self-contained HTML page."""
    verdict = '<span class="holds">isolated</span>' if proof.holds else '<span class="fails">not proven isolated</span>'
    facts = [("tenants", proof.tenants), ("pairs", proof.pairs), ("requests", f"{proof.requests:,}")]
    sections = "".join(_findings(title, text, getattr(proof, name)) for name, title, text in _LISTS)
    unknown = _list("Condition keys that nobody has stated", proof.unknown_keys) if proof.unknown_keys else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Isolation of {escape(proof.environment)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Environment {escape(proof.environment)}: {verdict}</h1>"
        f'<div class="facts">{"".join(_fact(name, value) for name, value in facts)}</div>'
        f"{sections}{_wires(proof.foreign_wires)}{unknown}"
        f"{_list('Listings that IAM cannot scope to a tenant: names show, contents do not', proof.unscopable)}"
        f"{_survey_section(survey) if survey else ''}"
        f"{_list('What this page rests on', _LIMITS)}</body></html>\n"
    )


def _fact(name: str, value: object) -> str:
    return f'<div><div class="number">{value}</div>{name}</div>'


def _findings(title: str, text: str, findings: Sequence[Finding]) -> str:
    heading = f"<h2>{title}: {len(findings)}</h2><p>{text}</p>"
    if not findings:
        return heading
    columns = ("Who", "Action", "Resource", "Whose", "Stated, or what for", "Decided by")
    rows = [
        (
            f"{item.tenant} {item.principal}",
            item.action,
            item.resource,
            item.target,
            item.stated,
            "; ".join(item.decided_by),
        )
        for item in findings
    ]
    return heading + _table(columns, rows)


def _wires(wires: Sequence[Wire]) -> str:
    heading = f"<h2>{_WIRES[0]}: {len(wires)}</h2><p>{_WIRES[1]}</p>"
    columns = ("Who", "Resource", "Property", "Names", "Whose", "What is wrong")
    rows = [(item.tenant, item.resource, item.where, item.reaches, item.target, item.why) for item in wires]
    return heading + (_table(columns, rows) if rows else "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(title: str, items: Sequence[str]) -> str:
    return f"<h2>{escape(title)}</h2><ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _survey_section(survey: Survey) -> str:
    rows = [(str(verdict.mutant.origin), verdict.mutant.what, verdict.reason) for verdict in survey.survivors]
    heading = (
        f"<h2>Mutants of {escape(survey.tenant)}'s policies: {len(survey.verdicts)}, of them caught "
        f"{len(survey.caught)}</h2><p>Each statement broken in turn. Those that opened nothing, and why:</p>"
    )
    return heading + _table(("Statement", "Break", "Why nothing opened"), rows)
