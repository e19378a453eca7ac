"""`prices refresh` and `prices show`: what plans are costed by."""

import datetime
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.options import JsonOption
from trainyard.cli.output import console, print_json
from trainyard.spec.words import counted

if TYPE_CHECKING:
    from trainyard.planner.fitted import Fitted

app = typer.Typer(help="The prices that plans are costed by: show, refresh.", no_args_is_help=False)

RegionOption = Annotated[str, typer.Option("--region", help="The region whose prices are meant.")]
InstancesOption = Annotated[
    str | None, typer.Option("--instances", metavar="TYPE,TYPE", help="Instance types; default: all with GPUs.")
]


@app.callback(invoke_without_command=True)
def _no_verb(context: typer.Context) -> None:
    """The prices that plans are costed by: show, refresh."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def refresh(region: RegionOption = "us-east-1", instances: InstancesOption = None, as_json: JsonOption = False) -> None:
    """Read today's prices from AWS: on demand (EC2's and SageMaker's own), spot, capacity blocks, training plans.

    Needs credentials of any account with pricing:GetProducts, ec2:DescribeSpotPriceHistory,
    ec2:DescribeCapacityBlockOfferings and sagemaker:SearchTrainingPlanOfferings; what one of them refuses is named.

    Example: trainyard prices refresh --region us-west-2 --instances p5.48xlarge,p5en.48xlarge
    """
    from trainyard.launch.session import price_file
    from trainyard.operate import prices

    prices.check_region(region)
    types, file = prices.gpu_types(_named(instances)), price_file()
    with console(stderr=True).status("asking AWS"):
        found = prices.refresh(_client(), region, types, today=datetime.date.today())
        total = prices.keep(file, found)
    if as_json:
        print_json({"read": len(found.rows), "kept": total, "file": file, "problems": found.problems})
        return
    print(f"{counted(len(found.rows), 'price')} read, {total} in {file}")
    for problem in found.problems:
        print(f"  {problem}")


@app.command()
def show(region: RegionOption = "us-east-1", instances: InstancesOption = None, as_json: JsonOption = False) -> None:
    """Show what an instance-hour costs by the way it is bought, of which day, and what is too old to be quoted.

    Example: trainyard prices show --region us-east-1 --instances p5.48xlarge
    """
    from trainyard.errors import InputError
    from trainyard.hardware import PriceBook
    from trainyard.hardware.prices import PURCHASES
    from trainyard.launch.session import price_file
    from trainyard.operate import prices

    prices.check_region(region)
    types = prices.gpu_types(_named(instances))
    today = datetime.date.today()
    book, any_age = (PriceBook.opened(price_file(), today=day) for day in (today, None))
    rows: list[dict[str, Any]] = []
    for name in types:
        for purchase in PURCHASES:
            try:
                found = any_age.price(f"ml.{name}", region, purchase)
            except InputError:
                continue
            row = {"instance_type": name, "purchase": purchase, **found.__dict__, "refused": ""}
            try:
                book.price(f"ml.{name}", region, purchase)
            except InputError as error:
                row["refused"] = str(error)
            rows.append({**row, "instance_type": name})
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    if not rows:
        raise InputError(f"no price of {', '.join(types[:5])} is known in {region}; trainyard prices refresh")
    console().print(_table(rows))


def _named(instances: str | None) -> list[str]:
    from trainyard.errors import InputError

    if instances is not None and not instances.replace(",", "").strip():
        raise InputError(f"--instances {instances!r}: names no type; leave it out for all with GPUs")
    return (instances or "").split(",")


def _table(rows: list[dict[str, Any]]) -> "Fitted":
    from rich.table import Table

    from trainyard.planner.fitted import Fitted

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("instance", "bought", "USD/h", "as of", "basis"):
        table.add_column(name, no_wrap=name != "basis", justify="right" if name == "USD/h" else "left")
    for row in rows:
        style = "dim" if row["refused"] else ""
        basis = "TOO OLD to be quoted" if row["refused"] else row["basis"]
        usd = f"{row['usd_per_hour']:,.4f}"
        table.add_row(row["instance_type"], row["purchase"], usd, str(row["as_of"]), basis, style=style)
    return Fitted(table)


def _client() -> Any:
    """(service, region) -> a client with the caller's own credentials."""
    from trainyard.launch.aws import aws_errors
    from trainyard.launch.endpoint import EndpointSession
    from trainyard.launch.session import client_config

    def made(service: str, region: str) -> Any:
        with aws_errors("opening", f"a session for {service}"):
            session = EndpointSession(endpoint_url=None, region_name=region)
            return session.client(service, config=client_config())

    return made
