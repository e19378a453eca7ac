"""AWS access for a verb: the account first (the right one, or nothing happens), then the tenant's launcher role.

The account's own credentials read the tenant contract and assume roles, nothing else; every other call of a
verb is made as the tenant's launcher, so that what a person can do to a tenant is what that role may do.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.aws import aws_errors
from trainyard.spec.checkpoint_names import why_not_here
from trainyard.spec.platform import EnvironmentSpec

if TYPE_CHECKING:
    from trainyard.emulator import EmulatorInfo
    from trainyard.launch.endpoint import EndpointSession

ROLE_SESSION_SECONDS = 3600
"""STS limits a role assumed by another role to one hour; longer waits refresh."""


def checkout_root() -> Path:
    """The folder that holds this trainyard: where environments/, jobs/ and .trainyard/ lie."""
    return Path(__file__).resolve().parents[2]


def state_root() -> Path:
    """<checkout>/.trainyard, or TRAINYARD_STATE_DIR: the emulator's state, local jobs, the quickstart's outputs.
    InputError where that is no path of this machine: a folder called `~` would be made where one is."""
    stated = os.environ.get("TRAINYARD_STATE_DIR")
    if stated and (why := why_not_here(Path(stated))) is not None:
        raise InputError(f"TRAINYARD_STATE_DIR {stated}: {why}")
    return Path(stated) if stated else checkout_root() / ".trainyard"


_CANNOT_WRITE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT})


def unwritable(error: OSError) -> InputError | None:
    """What to say of an error that came of the state folder, or of a full disk; None for any other error."""
    root = state_root()
    name = error.filename
    why = os.strerror(error.errno or 0)
    if name is None and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a write names no file
        return InputError(
            f"a disk is full ({why}): the state folder's, {root}, or the one that the output goes to; make room there, "
            "or name another folder in TRAINYARD_STATE_DIR"
        )
    is_inside = isinstance(name, str | bytes) and _is_below(Path(os.fsdecode(name)), root)
    is_missing = error.errno == errno.ENOENT and not root.exists()
    if not (is_inside and (is_missing or error.errno in _CANNOT_WRITE)):
        return None
    return InputError(
        f"the state folder {root}: can't be written ({why}); make room or rights there, or name another folder in "
        "TRAINYARD_STATE_DIR"
    )


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a path is the folder's or below it, by their words or by where their links lead; none need exist."""
    where, whose = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return path.absolute().is_relative_to(folder.absolute()) or where.is_relative_to(whose)


def price_file() -> Path:
    """What `trainyard prices refresh` writes, and plans read before the shipped prices."""
    return state_root() / "prices.json"


def emulator_state() -> Path:
    """Where the emulator that stands in for AWS keeps its state."""
    return state_root() / "emulator"


@dataclass(frozen=True)
class Account:
    """Who we are in the environment's account, as a boto3 session."""

    session: "EndpointSession"

    def client(self, service: str, region: str | None = None) -> Any:
        """A client of that service, in the environment's region if in no other, and at its endpoint."""
        return self.session.client(service, region_name=region, config=client_config())

    def variables(self) -> dict[str, str]:
        """The SDK's environment variables for a process that shall act as we do; a role's keys end with its hour."""
        keys = self.session.get_credentials().get_frozen_credentials()
        found = {
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
            "AWS_SESSION_TOKEN": keys.token,
            "AWS_REGION": self.session.region_name,
            "AWS_DEFAULT_REGION": self.session.region_name,
            "AWS_ENDPOINT_URL": self.session.endpoint_url,
        }
        if self.session.endpoint_url:
            from trainyard.emulator.info import past_proxies

            found |= past_proxies()
        return {name: value for name, value in found.items() if value}


def client_config() -> Any:
    """Few and quick retries: a verb that a person waits for should say what is wrong within seconds."""
    from botocore.config import Config

    return Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"max_attempts": 3, "mode": "standard"},
        user_agent_extra="trainyard",
    )


def open_account(environment: EnvironmentSpec) -> Account:
    """Credentials for the environment's account; AwsRefusedError where there are none or they are another account's."""
    account = _emulated(environment) if environment.emulated else _real(environment)
    with aws_errors("reading the caller's identity in", f"environment {environment.name}"):
        found = account.client("sts").get_caller_identity()["Account"]
    if found != environment.account:
        raise AwsRefusedError(
            f"wrong AWS account: the credentials belong to {found}, environment {environment.name} is account "
            f"{environment.account}; set AWS_PROFILE to a profile of that account, or choose another --environment"
        )
    return account


def emulated_account(info: "EmulatorInfo", region: str) -> Account:
    """The emulator's account in a region, as its administrator."""
    from trainyard.launch.endpoint import EndpointSession

    session = EndpointSession(
        endpoint_url=info.endpoint,
        aws_access_key_id=info.admin_access_key_id,
        aws_secret_access_key=info.admin_secret_access_key,
        region_name=region,
    )
    return Account(session)


def _emulated(environment: EnvironmentSpec) -> Account:
    from trainyard import emulator

    info = emulator.find(emulator_state())
    if info is None:
        raise AwsRefusedError(
            f"environment {environment.name} is emulated and no emulator is running; start it with "
            "`scripts/quickstart` (deploys too) or `trainyard emulator start`"
        )
    return emulated_account(info, environment.region)


def _real(environment: EnvironmentSpec) -> Account:
    from trainyard.launch.endpoint import EndpointSession

    with aws_errors("opening an AWS session for", f"environment {environment.name}"):
        session = EndpointSession(endpoint_url=None, region_name=environment.region)
        if session.get_credentials() is None:
            raise AwsRefusedError(
                f"environment {environment.name}: no AWS credentials found; run `aws sso login`, or set AWS_PROFILE"
            )
    return Account(session)


def assume(account: Account, role_arn: str, *, session_name: str) -> Account:
    """The same account as another role, refreshed by itself before its hour is over; refused here, not at first use."""
    from botocore.credentials import RefreshableCredentials
    from botocore.session import get_session

    from trainyard.launch.endpoint import EndpointSession

    sts = account.client("sts")

    def fetch() -> dict[str, str]:
        answer = sts.assume_role(
            RoleArn=role_arn, RoleSessionName=session_name[:64], DurationSeconds=ROLE_SESSION_SECONDS
        )["Credentials"]
        return {
            "access_key": answer["AccessKeyId"],
            "secret_key": answer["SecretAccessKey"],
            "token": answer["SessionToken"],
            "expiry_time": answer["Expiration"].isoformat(),
        }

    with aws_errors("assuming", role_arn, "ask the platform team to let you assume the tenant's launcher role"):
        first = fetch()
    botocore_session = get_session()
    # botocore has no public way to put refreshable credentials into a session; boto3's own guides set this attribute.
    botocore_session._credentials = RefreshableCredentials.create_from_metadata(
        metadata=first, refresh_using=fetch, method="sts-assume-role"
    )
    return Account(
        EndpointSession(
            endpoint_url=account.session.endpoint_url,
            botocore_session=botocore_session,
            region_name=account.session.region_name,
        )
    )
