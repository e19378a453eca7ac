"""What a caller needs to know of a running emulator, and how the daemon writes it down."""

import dataclasses
import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACCOUNT = "123456789012"
REGION = "us-east-1"
INFO_FILE = "emulator.json"
LOCK_FILE = "daemon.lock"
LOG_FILE = "emulator.log"
CONTROL_PREFIX = "/trainyard-emulator/"
ADMIN_HEADER = "X-Trainyard-Admin-Secret"
"""What POSTs below CONTROL_PREFIX carry: the root's secret access key."""
DEFAULT_STATE_DIR = Path(__file__).resolve().parents[2] / ".trainyard" / "emulator"


_LOOPBACK = ("localhost", "127.0.0.1")


def past_proxies() -> dict[str, str]:
    """The variables that keep a process from looking for the emulator on a proxy's machine: with what is there already,
    and in both spellings, as programs differ in which they read."""
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    direct = ",".join(dict.fromkeys([*(name for name in own.split(",") if name), *_LOOPBACK]))
    return {"NO_PROXY": direct, "no_proxy": direct}


def open_here(request: str | urllib.request.Request, timeout_seconds: float) -> Any:
    """`urlopen` of one of its own endpoints. Never by a proxy: that would look for it on another machine."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return direct.open(request, timeout=timeout_seconds)


@dataclass(frozen=True)
class EmulatorInfo:
    """A running emulator: where it listens and the root key of its account."""

    endpoint: str
    """`http://localhost:PORT`: the CDK CLI and presigned URLs want the name, not 127.0.0.1."""
    port: int
    pid: int
    account: str
    region: str
    admin_access_key_id: str
    admin_secret_access_key: str
    instance_id: str = ""
    """New for every daemon: what was deployed to another instance is gone."""
    started_now: bool = False
    """True only from the `start` that started it."""

    def environment(self) -> dict[str, str]:
        """The variables that point the real CDK CLI and SDKs here, as the account's root, past any proxy."""
        return {
            **past_proxies(),
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.admin_access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.admin_secret_access_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            # Without it SDKs that find no credentials wait for an instance metadata service.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def public(self) -> dict[str, object]:
        """Everything but the root key, to be shown."""
        return {key: value for key, value in dataclasses.asdict(self).items() if not key.startswith("admin_")}


def write_info(state_dir: Path, info: EmulatorInfo) -> None:
    """Write DIR/emulator.json whole or not at all, readable by its owner only: it holds the root key."""
    temporary = state_dir / f"{INFO_FILE}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(info), file, indent=2)
    temporary.replace(state_dir / INFO_FILE)


def read_info(state_dir: Path) -> EmulatorInfo | None:
    """The info of DIR/emulator.json, or None where there is none or it is not one (a torn or foreign file)."""
    try:
        return EmulatorInfo(**json.loads((state_dir / INFO_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
