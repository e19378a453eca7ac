"""Two hosts with a network of their own, which can be parted: network namespaces on a bridge (Linux, root)."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "eth0"
_SWITCH = "switch"


@dataclass(frozen=True)
class Network:
    """Namespaces by host, each with one address."""

    mark: str
    addresses: dict[str, str]

    def inside(self, host: str) -> list[str]:
        """What a command begins with to run on that host."""
        return ["nsenter", f"--net=/run/netns/{self._name(host)}"]

    def namespace(self, host: str) -> str:
        """The host's namespace, as `ip netns` names it."""
        return self._name(host)

    def part(self, host: str) -> None:
        """No packet reaches the host or comes from it; nobody is told."""
        _ip("-n", self._name(_SWITCH), "link", "set", self._port(host), "nomaster")

    def heal(self, host: str) -> None:
        """As before."""
        _ip("-n", self._name(_SWITCH), "link", "set", self._port(host), "master", "bridge")

    def _name(self, host: str) -> str:
        return f"ty-{self.mark}-{host}"

    @staticmethod
    def _port(host: str) -> str:
        return f"to-{host}"

    def build(self) -> None:
        """The switch, the hosts and their cables."""
        switch = self._name(_SWITCH)
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host, address in self.addresses.items():
            own = self._name(host)
            _ip("netns", "add", own)
            _ip(
                "link",
                "add",
                INTERFACE,
                "netns",
                own,
                "type",
                "veth",
                "peer",
                "name",
                self._port(host),
                "netns",
                switch,
            )
            _ip("-n", own, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for name, namespace in ((INTERFACE, own), ("lo", own), (self._port(host), switch)):
                _ip("-n", namespace, "link", "set", name, "up")
            self.heal(host)

    def remove(self) -> None:
        """Everything that `build` made."""
        for host in (*self.addresses, _SWITCH):
            subprocess.run(["ip", "netns", "delete", self._name(host)], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(mark: str, hosts: list[str]) -> Iterator[Network]:
    """A network of these hosts for the block. `mark`: short, the network's own."""
    made = Network(mark, {host: f"10.231.0.{number + 1}" for number, host in enumerate(hosts)})
    try:
        made.build()
        yield made
    finally:
        made.remove()


def why_not() -> str:
    """Why this machine can't have such a network; "" where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(f"t{os.getpid() % 10_000}", ["a"]):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        return f"no network namespace with a bridge can be made here: {said}"
