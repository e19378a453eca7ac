"""What the machines of a tenant's cluster run as root when they start: said once, for the stacks that write it into a
launch template and for the proof of isolation, which holds every template against it."""

from typing import NamedTuple

MOUNT = """\
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="==TRAINYARD=="

--==TRAINYARD==
Content-Type: text/x-shellscript; charset="us-ascii"

#!/bin/bash
# Nobody may enter the folder while nothing is mounted there: a job on a machine without the files fails at once.
install -d -m 000 /fsx
for try in $(seq 30); do
  mount -t lustre -o noatime,flock {dns}@tcp:/{mount} /fsx && break
  sleep 10
done
mountpoint -q /fsx && install -d -m 1777 /fsx/cluster
{small}
--==TRAINYARD==--
"""
"""PCS joins it with user data of its own, so that it must be MIME; it runs before Slurm's daemon starts (PCS user
guide, "Working with Amazon EC2 user data")."""

MOUNT_SMALL_FILES = """\
install -d -m 000 /efs
for try in $(seq 30); do
  mount -t efs -o tls,iam,accesspoint={folder} {files}:/ /efs && break
  sleep 10
done
"""
"""By amazon-efs-utils, which brings the TLS and the machine's role that the file system's policy asks for."""


class SmallFilesMount(NamedTuple):
    """Ids of a file system for small files and of its access point."""

    files: str
    folder: str


def machine_start(dns: str, mount: str, small: SmallFilesMount | None) -> str:
    """The user data of every machine, the login node included. `dns`, `mount`: of the tenant's Lustre."""
    text = MOUNT.replace("{dns}", dns).replace("{mount}", mount)
    if small is None:
        return text.replace("{small}", "")
    mounted = MOUNT_SMALL_FILES.replace("{folder}", small.folder).replace("{files}", small.files)
    return text.replace("{small}", mounted)
