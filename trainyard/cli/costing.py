"""`cost`: who spent what of a month, by day, tenant, job or cost centre; as a table, as JSON, as CSV for chargeback."""

import csv
import datetime
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JsonOption, ThisTenantOption
from trainyard.cli.output import console, print_json
from trainyard.errors import InputError

if TYPE_CHECKING:
    from decimal import Decimal

    from trainyard.launch.place import TenantAccess
    from trainyard.operate.costs import Charge, Forecast, Group
    from trainyard.spec.platform import EnvironmentSpec

    Planned = dict[str, tuple[Decimal | None, str | None]]
    """Of a job: planned dollars, state."""

ByOption = Annotated[
    Literal["day", "tenant", "job", "cost-centre"], typer.Option("--by", help="What a line of the table is of.")
]
MonthOption = Annotated[str | None, typer.Option("--month", metavar="YYYY-MM", help="Default: this month (UTC).")]
CsvOption = Annotated[bool, typer.Option("--csv", help="One line a job and day, for chargeback.")]
ForecastOption = Annotated[bool, typer.Option("--forecast", help="The month's end, at the pace of the last days.")]


def register(app: typer.Typer) -> None:
    """Put the verb of this file into the command line."""
    app.command()(cost)


def cost(
    by: ByOption = "tenant",
    month: MonthOption = None,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: ThisTenantOption = None,
    with_forecast: ForecastOption = False,
    as_csv: CsvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what training jobs have cost, from SageMaker's account of them, at a named and dated price.

    Example: trainyard cost --by job --month 2026-03 --tenant acme
    """
    from trainyard.hardware import PriceBook
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import price_file
    from trainyard.operate import costs
    from trainyard.spec.platform import load_environment

    if as_csv and (as_json or with_forecast):
        raise InputError("--csv: is the charges alone; leave --json and --forecast out")
    now = datetime.datetime.now(datetime.UTC)
    since, until = costs.months(month, now)
    spec = load_environment(environment_file(environment))
    with console(stderr=True).status("asking SageMaker"):
        names = [tenant] if tenant else sorted(spec.tenants)
        opened, absent = _opened(spec, names)
        meter = costs.Meter(PriceBook.opened(price_file(), today=now.date()), since=since, until=until, now=now)
        charges = [charge for access in opened.values() for charge in meter.charges(access)]
        groups = costs.grouped(charges, by)
        planned: Planned = _planned(groups, charges, opened) if by == "job" else {}
        expected = costs.forecast(charges, since=since, until=until, now=now) if with_forecast else None
    total = costs.summed("total", charges)
    left_out = [*_left_out(total), *absent]
    if tenant is None and until <= now:
        left_out.append(f"of the tenants that {spec.name} has now; one that was removed since is in no line")
    for why in meter.unread:
        print(f"warning: {why}; what that job cost is under its training job's name", file=sys.stderr)
    if as_csv or as_json:
        for line in left_out:
            print(f"warning: {line}", file=sys.stderr)
    if as_csv:
        writer = csv.DictWriter(sys.stdout, costs.CSV_FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(charge.row() for charge in charges)
        return
    if as_json:
        _print_json(since, groups, total, charges, planned, expected, opened)
        return
    _print_table(by, groups, total, planned, _budgets(by, opened))
    for line in [*_notes(since, charges, expected, opened, emulated=spec.emulated), *left_out]:
        print(line)


def _opened(spec: "EnvironmentSpec", names: "Sequence[str]") -> "tuple[dict[str, TenantAccess], list[str]]":
    """Those that are deployed, and a line of each other; NotDeployedError where none is."""
    from trainyard.launch.contract import NotDeployedError
    from trainyard.launch.place import open_tenant

    opened: dict[str, TenantAccess] = {}
    absent: dict[str, NotDeployedError] = {}
    for name in names:
        try:
            opened[name] = open_tenant(spec, name, "--tenant")
        except NotDeployedError as error:
            absent[name] = error
    if not opened and absent:
        raise next(iter(absent.values()))
    return opened, [f"tenant {name} is not counted: {error}" for name, error in absent.items()]


def _planned(groups: "Sequence[Group]", charges: "Sequence[Charge]", opened: "dict[str, TenantAccess]") -> "Planned":
    """What each job's plan said of its machines, and the job's state; Nones where there is no record any more."""
    from trainyard.operate.costs import planned_usd

    owners = {charge.job_id: charge.tenant for charge in charges}
    found: Planned = {}
    for group in groups:
        place = opened[owners[group.key]].place
        try:
            record = place.store.read(group.key).record
        except InputError:
            found[group.key] = (None, None)
            continue
        # A record is as old as the last look at its job.
        found[group.key] = (planned_usd(record), place.backend.states([record]).get(group.key, record.state))
    return found


def _budgets(by: str, opened: "dict[str, TenantAccess]") -> dict[str, tuple[float, float | None]]:
    """A tenant's quotas of a month, dollars and GPU-hours, where a line is a tenant."""
    if by != "tenant":
        return {}
    return {name: (item.contract.monthly_usd, item.contract.monthly_gpu_hours) for name, item in opened.items()}


def _print_table(
    by: str,
    groups: "Sequence[Group]",
    total: "Group",
    planned: "Planned",
    budgets: dict[str, tuple[float, float | None]],
) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(by.replace("-", " "), no_wrap=True)
    extra = ["planned USD", "plan is"] if by == "job" else ["of budget", "of GPU-hours"] if by == "tenant" else []
    for name in ("jobs", "instance-hours", "GPU-hours", "USD", *extra):
        table.add_column(name, justify="right", no_wrap=True)
    for group in [*groups, total]:
        usd = f"{'at least ' if group.unpriced else ''}{group.usd:,.2f}"
        gpu_hours = f"{'at least ' if group.uncounted else ''}{group.gpu_hours:,.2f}"
        row = [group.key, str(group.num_jobs), f"{group.instance_hours:,.2f}", gpu_hours, usd]
        if group is not total:
            row += _against_plan(group, *planned[group.key]) if by == "job" else []
            row += _against_budget(group, *budgets[group.key]) if by == "tenant" else []
        table.add_row(*row, style="bold" if group is total else "")
    console().print(table)


def _against_plan(group: "Group", planned: "Decimal | None", state: str | None) -> list[str]:
    """What was planned is of the whole job: before that has completed there is nothing to hold it against."""
    if planned is None:
        return ["-", "-"]
    if state != "Completed" or not group.usd or group.unpriced:
        return [f"{planned:,.2f}", f"of a job that is {state}" if state != "Completed" else "-"]
    off = planned / group.usd - 1
    return [f"{planned:,.2f}", f"{abs(off):.0%} too {'high' if off > 0 else 'low'}"]


def _against_budget(group: "Group", usd: float, gpu_hours: float | None) -> list[str]:
    hours = "-" if gpu_hours is None else f"{float(group.gpu_hours) / gpu_hours:.1%} of {gpu_hours:,.0f}"
    return [f"{float(group.usd) / usd:.1%} of {usd:,.0f}", hours]


def _notes(
    since: datetime.datetime,
    charges: "Sequence[Charge]",
    expected: "Forecast | None",
    opened: "dict[str, TenantAccess]",
    *,
    emulated: bool,
) -> list[str]:
    """The month, its end, and every price with its basis and date."""
    lines = [f"{since:%Y-%m} (UTC){'; AWS is emulated here: nobody is billed' if emulated else ''}"]
    if expected is not None:
        lines.append(_forecast_line(expected, sum(access.contract.monthly_usd for access in opened.values())))
    prices = {(charge.instance_type, charge.price.basis): charge.price for charge in charges if charge.price}
    for (kind, basis), price in sorted(prices.items()):
        lines.append(f"price: {kind} {price.usd_per_hour:g} USD/h in {price.region}, {basis}; as of {price.as_of}")
    return lines


def _left_out(total: "Group") -> list[str]:
    """Types that the sums don't have."""
    lines = []
    if total.unpriced:
        lines.append(f"without a known price, and in no dollar above: {', '.join(total.unpriced)}")
    if total.uncounted:
        lines.append(f"with GPUs that trainyard doesn't know, and in no GPU-hour above: {', '.join(total.uncounted)}")
    return lines


def _forecast_line(expected: "Forecast", budget_usd: float) -> str:
    between = ""
    if expected.low_usd is not None and expected.high_usd is not None:
        between = f" ({expected.low_usd:,.2f} to {expected.high_usd:,.2f}, 80 % interval)"
    of = f"the last {expected.num_days} full days' and today's" if expected.num_days else "today's"
    return (
        f"forecast: {expected.expected_usd:,.2f} USD at the month's end{between}, at {of} pace of "
        f"{expected.pace_usd_per_day:,.2f} USD a day; budget {budget_usd:,.0f} USD"
    )


def _print_json(
    since: datetime.datetime,
    groups: "Sequence[Group]",
    total: "Group",
    charges: "Sequence[Charge]",
    planned: "Planned",
    expected: "Forecast | None",
    opened: "dict[str, TenantAccess]",
) -> None:
    """Dollars as text: a JSON number would be read as a float."""
    lines: list[dict[str, Any]] = [
        {**group.__dict__, **dict(zip(("planned_usd", "state"), planned.get(group.key, ()), strict=False))}
        for group in groups
    ]
    print_json(
        {
            "month": f"{since:%Y-%m}",
            "groups": lines,
            "total": total.__dict__,
            "forecast": expected.__dict__ if expected else None,
            "budgets": {
                name: {"usd": item.contract.monthly_usd, "gpu_hours": item.contract.monthly_gpu_hours}
                for name, item in opened.items()
            },
            "charges": [charge.row() for charge in charges],
        }
    )
