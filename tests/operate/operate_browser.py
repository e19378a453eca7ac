"""Debian's Chromium without a window: the one that is installed, or its packages unpacked into a folder of their own.

Nothing is installed: `apt-get download` brings the packages that are missing, `dpkg -x` unpacks them, and the browser
is told where its libraries lie.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.gettempdir()) / f"trainyard-chromium-{os.getuid()}"
SECONDS = 300.0


class NoBrowserError(Exception):
    """Why there is none."""


def chromium() -> tuple[str, dict[str, str]]:
    """(the program, its environment); NoBrowserError where there is none and none can be had."""
    if found := shutil.which("chromium"):
        return found, dict(os.environ)
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoBrowserError("no chromium on the PATH, and this is no Debian that could fetch one")
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "complete").exists():
            _fetch()
    folders = sorted({str(path.parent) for path in (FOLDER / "root").rglob("*.so*")})
    program = str(FOLDER / "root/usr/lib/chromium/chromium")
    return program, {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}


def _fetch() -> None:
    """Chromium, and what it needs of what isn't installed."""
    needed = _ran(["apt-get", "-s", "install", "--no-install-recommends", "chromium"])
    names = re.findall(r"^Inst (\S+)", needed, flags=re.MULTILINE)
    if not names:
        raise NoBrowserError("apt-get knows no chromium; `apt-get update` brings the archive's lists")
    archives = FOLDER / "debs"
    archives.mkdir(exist_ok=True)
    _ran(["apt-get", "download", *names], cwd=archives)
    for package in sorted(archives.glob("*.deb")):
        _ran(["dpkg", "-x", str(package), str(FOLDER / "root")])
    shutil.rmtree(archives)
    (FOLDER / "complete").touch()


def _ran(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise NoBrowserError(f"{' '.join(command[:3])}: {done.stderr.strip()[-300:]}")
    return done.stdout


LOOK = """<!DOCTYPE html><meta charset=utf-8><iframe id=page width=1080 height=5000 src="%s"></iframe><script>
page.onload = () => {
  const inside = page.contentDocument, view = page.contentWindow;
  const rect = item => { const r = item.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const pictures = [...inside.querySelectorAll("svg")].map(svg => ({
    name: svg.getAttribute("aria-label"), rect: rect(svg),
    texts: [...svg.querySelectorAll("text")].map(text => ({words: text.textContent, rect: rect(text)})),
  }));
  const told = {title: inside.title, text: inside.body.innerText, scripts: inside.scripts.length, pictures,
    resources: view.performance.getEntriesByType("resource").map(item => item.name)};
  document.body.textContent = "LOOKED" + JSON.stringify(told) + "LOOKED";
};
</script>"""


def look_at(page: Path, folder: Path) -> dict[str, Any]:
    """What a browser makes of a page: its title, words and resources, and where each picture and its words lie."""
    program, environment = chromium()
    harness = folder / "look.html"
    harness.write_text(LOOK % page.as_uri(), encoding="utf-8")
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        "--allow-file-access-from-files",  # the harness reads the page that it holds
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=20000",
    ]
    done = subprocess.run(
        [program, *options, "--dump-dom", harness.as_uri()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    parts = done.stdout.split("LOOKED")
    assert len(parts) >= 3, f"{done.returncode}: {done.stderr[-1000:]}\n{done.stdout[-1000:]}"
    from html import unescape

    told: dict[str, Any] = json.loads(unescape(parts[-2]))
    return told
