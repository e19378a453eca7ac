"""What verbs print: results on stdout, progress and errors on stderr, JSON where a program reads."""

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.errors import InputError, TrainyardError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from trainyard.launch.backend import Say

PIPE_WIDTH = 400
"""Columns where no terminal says how many: room for any S3 URI."""


def report_error(error: TrainyardError) -> None:
    """`trainyard: <what, where, how to mend it>` on stderr, in one line."""
    print(f"trainyard: {' '.join(str(error).split())}", file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, default=str))


def check_page(option: str, path: Path) -> None:
    """InputError before anything is worked out, where `option` names what no page can be written to."""
    from trainyard.spec.checkpoint_names import why_not_here

    if (why := why_not_here(path)) is not None:
        raise InputError(f"{option} {_cut(path)}: {why}")
    try:
        is_folder, is_there = path.is_dir(), path.absolute().parent.is_dir()
    except (OSError, ValueError) as error:
        # A name that no file system takes: too long, or with a byte that ends it.
        raise _unwritten(option, path, error) from None
    if is_folder:
        raise InputError(f"{option} {_cut(path)}: is a folder; name a file in it")
    if not is_there:
        raise InputError(
            f"{option} {_cut(path)}: can't be written (there is no folder {_cut(path.parent)}); make it first"
        )


def write_page(option: str, path: Path, text: str) -> None:
    """The page that `option` asked for, whole or not at all: one that is there stays as it was on a full disk.
    InputError where it can't be written."""
    draft: Path | None = None
    try:
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        draft = target.with_name(f".{target.name[:200]}.{os.getpid()}")
        if target.exists() and not os.access(target.parent, os.W_OK):
            target.write_text(text, encoding="utf-8")  # where nothing can be made beside it
            return
        draft.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that go round (Python 3.11)
        if draft is not None:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        raise _unwritten(option, path, error) from None


def _is_stream(path: Path) -> bool:
    """A pipe, a device, or what this process has open already (`/dev/stdout`, a shell's `>(...)`)."""
    is_open = str(path.absolute()).startswith(("/dev/", "/proc/"))
    return is_open or (path.exists() and not path.is_file())


def _unwritten(option: str, path: Path, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else None
    return InputError(f"{option} {_cut(path)}: can't be written ({reason or error}); name another file")


def _cut(path: Path) -> str:
    """A path for a message, without the middle where it is endless."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def console(*, stderr: bool = False) -> "Console":
    """A rich console; in a pipe it prints plain lines, breaks none and cuts no id short.

    Text is printed as it is: most of it is somebody else's (a failure, a setting, a path), and rich would take
    `[rank0]` and `[q_proj,v_proj]` for styles, which print nothing, and `[/opt/ml]` for a mistake. Our own colours are
    a `Text` or a style.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def turner(spinner: "Status") -> "Say":
    """What is being done now, beside the spinner; as it is, too: rich reads a spinner's plain words as markup."""
    from rich.text import Text

    return lambda words: spinner.update(Text(words))


def teller(spinner: "Status", warned: set[str] | None = None) -> "Say":
    """What is being done turns the spinner; a warning is a line that stays, and is put into `warned`."""
    turn = turner(spinner)

    def say(words: str) -> None:
        if words.startswith("warning: "):
            spinner.console.print(words, style="yellow")
            if warned is not None:
                warned.add(words)
        else:
            turn(words)

    return say


def duration(seconds: float) -> str:
    """In the two largest units: 3 d 4 h, 2 h 5 min, 4 min 10 s."""
    whole = max(0, round(seconds))
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for index, (name, length) in enumerate(units):
        if whole >= length:
            below, size = units[index + 1] if index + 1 < len(units) else ("", 0)
            rest = (whole % length) // size if size else 0
            return f"{whole // length} {name}" + (f" {rest} {below}" if rest else "")
    return "0 s"
