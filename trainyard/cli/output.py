"""What verbs print: results on stdout, progress and errors on stderr, JSON where a program reads."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.errors import TrainyardError

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


def write_page(path: Path, text: str) -> None:
    """A page that a verb was asked for; OSError where it can't be written. What a full disk cut short is no page."""
    was_there = path.is_symlink() or path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if not was_there:
            with suppress(OSError):
                path.unlink()
        raise


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


def teller(spinner: "Status") -> "Say":
    """What is being done turns the spinner; a warning is a line that stays."""
    turn = turner(spinner)

    def say(words: str) -> None:
        if words.startswith("warning: "):
            spinner.console.print(words, style="yellow")
        else:
            turn(words)

    return say
