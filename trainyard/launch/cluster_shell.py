"""A shell where Slurm's commands are: on this machine, or on the login node of a tenant's cluster.

A script goes in, its exit code and output come back. Two ways: a process here, and a session of Session Manager, which
needs no open port and no key pair, and is the only way that the tenant's policies let anybody in.
"""

import base64
import gzip
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.launch.aws import aws_errors
from trainyard.launch.backend import SilentError
from trainyard.launch.session import Account
from trainyard.spec.platform import ClusterContract, TenantContract

LOCAL_SECONDS = 120.0
"""For one script here. Slurm's commands wait up to 30 s for a controller that is busy, and try again."""
SESSION_SECONDS = 180.0
"""For one script in a session, opening it included."""
KEPT_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "SLURM_CONF")
"""All that a job gets of the environment of who submits it here."""
PLUGIN = "session-manager-plugin"
_SESSION_VARIABLE = "AWS_SSM_START_SESSION_RESPONSE"
"""Where the plugin finds the session's token, from its version 1.2.497 on."""
_LINE_CHARACTERS = 900
"""Of packed text that is typed as one line."""
_LONGEST_LINE = 1000
"""Of all that is typed: a terminal holds 4,095 characters of a line that nobody has read yet, and drops the rest."""


_WRAPPER = """\
export PATH="$PATH$(printf ':%s' /opt/aws/pcs/scheduler/slurm-*/bin):/opt/slurm/bin"
bash_as_owner() { owner=$(id -un 1000 2>/dev/null || id -un)
if [ "$(id -un)" = "$owner" ]; then bash "$@"; return; fi
if ! sudo -n -u "$owner" true < /dev/null; then echo "run it as $owner, whose the cluster's files are" >&2; return 1; fi
sudo -n -H -u "$owner" env PATH="$PATH" ${SLURM_CONF:+SLURM_CONF="$SLURM_CONF"} bash "$@"; }
"""
"""A function for bash. The cluster's files belong to the AMI's ordinary user (uid 1000), whom all machines know, unlike
a session's own (ssm-user): scripts run as that one."""


@dataclass(frozen=True)
class Answer:
    """What a script said."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Why it failed, in one line."""
        lines = [line for text in (self.err, self.out) if (line := text.strip().rpartition("\n")[2].strip())]
        return lines[0] if lines else f"exit code {self.code}"


class ClusterShell(Protocol):
    """Runs bash scripts beside Slurm."""

    where: str
    """For messages."""

    def run(self, script: str, *arguments: str) -> Answer:
        """Run `script` with `arguments`; AwsRefusedError or InputError where that can't be had."""


class HereShell:
    """Bash on this machine, where `sbatch` is on the PATH."""

    where = "this machine"

    def __init__(self, *, as_owner: bool = False) -> None:
        """`as_owner`: as the user whose a tenant's cluster's files are, as a session does it."""
        self._start = f'{_WRAPPER}bash_as_owner -s -- "$@"' if as_owner else 'exec bash -s -- "$@"'

    def run(self, script: str, *arguments: str) -> Answer:
        """See ClusterShell."""
        try:
            done = subprocess.run(
                ["bash", "-c", self._start, "bash", *arguments],
                input=script.encode(),
                capture_output=True,
                timeout=LOCAL_SECONDS,
                check=False,
                env=bare_environment(),
            )
        except subprocess.TimeoutExpired:
            raise SilentError(
                f"Slurm's commands gave no answer within {LOCAL_SECONDS:.0f} s; does `scontrol ping` say UP?"
            ) from None
        return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def bare_environment() -> dict[str, str]:
    """Of this environment, what Slurm's commands need. They would hand on all of it to a job: a person's credentials,
    where the job has the rights of its machines, or the shape of another job, where that launches this one."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def has_slurm_here() -> bool:
    """Whether this machine can submit."""
    return shutil.which("sbatch") is not None


class SessionShell:
    """Bash on the tenant's login node, in one session of Session Manager that stays open between scripts.

    The terminal's echo is off, scripts and answers travel as base64 between marks.
    """

    def __init__(self, launcher: Account, contract: TenantContract) -> None:
        self._launcher = launcher
        self._contract = contract
        self._process: subprocess.Popen[bytes] | None = None
        self._terminal, self._heard = -1, b""
        self._number = 0
        self.where = f"the login node of tenant {contract.tenant}"

    def run(self, script: str, *arguments: str) -> Answer:
        """See ClusterShell."""
        if shutil.which(PLUGIN) is None:
            raise InputError(
                f"{PLUGIN}: is not on the PATH, and no `sbatch` either; install AWS's Session Manager plugin, or run "
                "this on the cluster's login node"
            )
        deadline = time.monotonic() + SESSION_SECONDS
        self._number += 1
        mark = f"trainyard{self._number}"
        try:
            if self._process is None or self._process.poll() is not None:
                self._open(deadline)
            self._type(typed_lines(script, arguments, mark), deadline)
            return read_answer(self._heard_until(f"{mark}=end", deadline), mark)
        except OSError as error:
            self.close()
            raise AwsAwayError(f"the session on {self.where} ended: {error.strerror}; repeat the command") from None

    def login_node(self) -> str:
        """Session Manager's name of the tenant's running login node; AwsRefusedError where there is none."""
        cluster = self._contract.cluster
        assert cluster is not None
        return self._hyperpods(cluster) if cluster.engine == "hyperpod" else self._tagged(cluster)

    def _hyperpods(self, cluster: ClusterContract) -> str:
        """SageMaker's machines are no EC2 instances of the account: a target of its own kind names them."""
        with aws_errors("looking for", self.where):
            pages = (
                self._launcher.client("sagemaker")
                .get_paginator("list_cluster_nodes")
                .paginate(ClusterName=cluster.id, InstanceGroupNameContains=cluster.login_tag)
            )
            found = [
                str(node["InstanceId"])
                for page in pages
                for node in page["ClusterNodeSummaries"]
                if node["InstanceGroupName"] == cluster.login_tag and node["InstanceStatus"]["Status"] == "Running"
            ]
        if not found:
            raise AwsRefusedError(
                f"{self.where}: none is running; HyperPod starts it with the cluster: aws sagemaker describe-cluster "
                f"--cluster-name {cluster.id}"
            )
        return f"sagemaker-cluster:{cluster.id.rpartition('/')[2]}_{cluster.login_tag}-{sorted(found)[0]}"

    def _tagged(self, cluster: ClusterContract) -> str:
        """PCS's machines are the tenant's EC2 instances, told apart by their tags."""
        wanted = {
            "tag:trainyard:tenant": self._contract.tenant,
            "tag:trainyard:environment": self._contract.environment,
            "tag:trainyard:node": cluster.login_tag,
            "instance-state-name": "running",
        }
        filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
        with aws_errors("looking for", self.where):
            pages = self._launcher.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
            found = [
                str(machine["InstanceId"])
                for page in pages
                for group in page["Reservations"]
                for machine in group["Instances"]
            ]
        if not found:
            raise AwsRefusedError(
                f"{self.where}: none is running; PCS starts it with the cluster: aws pcs get-cluster "
                f"--cluster-identifier {cluster.id}"
            )
        return sorted(found)[0]

    def _open(self, deadline: float) -> None:
        target = {"Target": self.login_node()}
        ssm = self._launcher.client("ssm")
        with aws_errors("opening a session on", self.where, "the node's SSM agent must be online"):
            answer = ssm.start_session(**target)
        session = {name: answer[name] for name in ("SessionId", "StreamUrl", "TokenValue")}
        region, endpoint = self._contract.region, str(ssm.meta.endpoint_url)
        # As the AWS CLI calls it: the token is in the environment, as everybody sees a process's arguments.
        command = [PLUGIN, _SESSION_VARIABLE, region, "StartSession", "", json.dumps(target), endpoint]
        ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {_SESSION_VARIABLE: json.dumps(session)},
        )
        os.close(theirs)
        self._terminal, self._heard = ours, b""
        os.set_blocking(ours, False)
        # Sessions begin with `sh`, which isn't bash everywhere. Its line editor would change the terminal's settings
        # between lines that are on their way.
        self._type(["exec bash --norc --noediting"], deadline)

    def _type(self, lines: Sequence[str], deadline: float) -> None:
        """What comes meanwhile is heard: a session that must first be listened to would take no more."""
        left = "".join(f"{line}\n" for line in lines).encode()
        while left:
            if self._wait(deadline, writes=True):
                with suppress(BlockingIOError):
                    # A line at a time: a terminal drops what is longer than it has room for, without a word.
                    left = left[os.write(self._terminal, left[: left.index(b"\n") + 1]) :]

    def _heard_until(self, end: str, deadline: float) -> str:
        while f"\n{end}".encode() not in self._heard:
            self._wait(deadline)
        heard, self._heard = self._heard, b""
        return heard.decode("utf-8", "replace")

    def _wait(self, deadline: float, *, writes: bool = False) -> bool:
        """Hears what there is to hear; whether the terminal takes more. AwsRefusedError at the deadline, or the end."""
        left = deadline - time.monotonic()
        if left <= 0:
            self.close()
            raise AwsAwayError(f"{self.where} gave no answer within {SESSION_SECONDS:.0f} s; repeat the command")
        terminal = [self._terminal]
        readable, writable, _ = select.select(terminal, terminal if writes else [], [], min(left, 1.0))
        try:
            heard = os.read(self._terminal, 65536) if readable else b""
        except OSError:
            heard = b""  # how a terminal says that nobody is at its other end any more
        self._heard += heard
        if not heard and (readable or (self._process is not None and self._process.poll() is not None)):
            words = self._heard.decode("utf-8", "replace").strip().splitlines()
            self.close()
            raise AwsAwayError(f"the session on {self.where} ended: {words[-1] if words else 'no reason given'}")
        return bool(writable)

    def close(self) -> None:
        """End the session."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGHUP)
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._terminal)
        self._process = None

    def __del__(self) -> None:
        """A verb that ends leaves no session behind."""
        with suppress(Exception):
            self.close()


def typed_lines(script: str, arguments: Sequence[str], mark: str) -> list[str]:
    """What is typed into the session's shell to run `script`, and to hear its output between marks."""
    # In the packed text, as a batch script in an argument is longer than a typed line can be.
    body = f"set -- {shlex.join(arguments)}\n{script}"
    packed = base64.b64encode(gzip.compress(body.encode(), mtime=0)).decode()
    # The marks are spelled in two pieces, so that an echo of what is typed is none.
    tell = f"tell() {{ echo; echo {mark}'='$1; }}"
    lines = [
        "stty -echo; PS1=; PS2=; unset PROMPT_COMMAND",
        *_WRAPPER.splitlines(),
        tell,
        f"packed=$(mktemp); cat > $packed <<'{mark}-script'",
        *(packed[start : start + _LINE_CHARACTERS] for start in range(0, len(packed), _LINE_CHARACTERS)),
        f"{mark}-script",
        "out=$(base64 -d < $packed | gunzip | bash_as_owner -s 2> $packed.err | gzip -c | base64 -w 76;"
        " echo code ${PIPESTATUS[2]})",
        'tell begin; echo "$out"; echo errors; gzip -c < $packed.err | base64 -w 76; rm -f $packed*; tell end',
    ]
    assert all(len(line) < _LONGEST_LINE for line in lines)
    return lines


def read_answer(heard: str, mark: str) -> Answer:
    """The answer in what a session said; AwsRefusedError where it is spoilt."""
    match = re.search(
        rf"\n{mark}=begin\r?\n(.*)code (\d+)\r?\n.*?errors\r?\n(.*?)\r?\n\r?\n?{mark}=end", heard, re.DOTALL
    )
    if match is None:
        raise AwsRefusedError("the session's answer can't be read; does `aws ssm start-session` give a bash prompt?")
    try:
        out, err = (gzip.decompress(base64.b64decode("".join(part.split()))) for part in match.group(1, 3))
    except (ValueError, OSError, EOFError) as error:
        raise AwsAwayError(f"the session's answer is spoilt ({error}); repeat the command") from None
    return Answer(int(match.group(2)), out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def shell_of(launcher: Account, contract: TenantContract) -> ClusterShell:
    """The tenant's cluster: by this machine where it is one of its machines; else by a session on the login node."""
    return HereShell(as_owner=True) if has_slurm_here() and _is_of(contract) else SessionShell(launcher, contract)


def _is_of(contract: TenantContract) -> bool:
    """Whether this machine is the tenant's: it has mounted the tenant's file system, which no other can. An `sbatch` on
    the PATH alone may be of any cluster."""
    command = ["findmnt", "--noheadings", "--output", "SOURCE", "--mountpoint", "/fsx"]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return mounted.strip().endswith(f":/{contract.file_system.mount_name}")
