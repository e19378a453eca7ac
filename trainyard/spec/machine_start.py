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
# By fstab, as this runs at the first start alone: a machine that is rebooted mounts it again, before Slurm's daemon.
sed -i '\\#[[:space:]]/fsx[[:space:]]#d' /etc/fstab
echo '{dns}@tcp:/{mount} /fsx lustre noatime,flock,_netdev 0 0' >>/etc/fstab
for try in $(seq 30); do
  mount /fsx && break
  sleep 10
done
mountpoint -q /fsx && install -d -m 1777 /fsx/cluster
{small}
--==TRAINYARD==--
"""
"""PCS joins it with user data of its own, so that it must be MIME; it runs before Slurm's daemon starts (PCS user
guide, "Working with Amazon EC2 user data"). A line that an image brought is another file system's, and goes. `_netdev`:
not before the network (FSx for Lustre user guide, "Mounting your Amazon FSx file system automatically")."""

MOUNT_SMALL_FILES = """\
install -d -m 000 /efs
sed -i '\\#[[:space:]]/efs[[:space:]]#d' /etc/fstab
echo '{files}:/ /efs efs _netdev,tls,iam,accesspoint={folder} 0 0' >>/etc/fstab
for try in $(seq 30); do
  mount /efs && break
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
