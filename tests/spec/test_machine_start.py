"""What machines of a cluster run at their start, run here: with an fstab of its own and mounts that only tell."""

import os
import subprocess
from pathlib import Path

import pytest

from trainyard.spec.machine_start import SmallFilesMount, machine_start

FILES = "fs-1.fsx.us-east-1.amazonaws.com@tcp:/abc /fsx lustre noatime,flock,_netdev 0 0"
SMALL = "fs-2:/ /efs efs _netdev,tls,iam,accesspoint=fsap-3 0 0"


@pytest.mark.parametrize(("small", "expected"), [(None, [FILES]), (SmallFilesMount("fs-2", "fsap-3"), [FILES, SMALL])])
def test_what_is_mounted_is_mounted_again_after_a_reboot(
    small: SmallFilesMount | None, expected: list[str], tmp_path: Path
) -> None:
    """User data runs at the first start alone. What an image brought of another file system's is not mounted."""
    table, told = tmp_path / "fstab", tmp_path / "told"
    table.write_text(
        "UUID=1 / xfs defaults 0 0\nfs-9@tcp:/other /fsx lustre _netdev 0 0\nfs-8:/ /efs efs _netdev 0 0\n"
        "fs-7@tcp:/third\t/fsx\tlustre\t_netdev\t0\t0\nfs-6:/fsx /mnt nfs _netdev 0 0\n"
    )
    text = machine_start("fs-1.fsx.us-east-1.amazonaws.com", "abc", small)
    script = text.split("\n\n", 2)[2].removesuffix("--==TRAINYARD==--\n").replace("/etc/fstab", str(table))
    assert script.startswith("#!/bin/bash\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, status in (("mount", 0), ("install", 0), ("mountpoint", 0), ("sleep", 1)):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{told}\nexit {status}\n')
        (tools / name).chmod(0o755)
    for _ in range(2):  # once more, as on a machine whose image was made of such a one
        told.write_text("")
        subprocess.run(["bash", "-c", script], env={"PATH": f"{tools}:{os.environ['PATH']}"}, check=True)
        left = [] if small else ["fs-8:/ /efs efs _netdev 0 0"]
        assert table.read_text().splitlines() == [
            "UUID=1 / xfs defaults 0 0",
            *left,
            "fs-6:/fsx /mnt nfs _netdev 0 0",
            *expected,
        ]
        mounted = [line for line in told.read_text().splitlines() if line.startswith("mount ")]
        assert mounted == [f"mount {line.split()[1]}" for line in expected], "by the table, so that it is tried at once"
