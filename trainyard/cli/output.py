"""What verbs print: results on stdout, progress and errors on stderr, JSON where a program reads."""

import json
import sys
from typing import TYPE_CHECKING, Any

from trainyard.errors import TrainyardError

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 400
"""Columns where no terminal says how many: room for any S3 URI."""


def report_error(error: TrainyardError) -> None:
    """`trainyard: <what, where, how to mend it>` on stderr, in one line."""
    print(f"trainyard: {' '.join(str(error).split())}", file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, default=str))


def console(*, stderr: bool = False) -> "Console":
    """A rich console; in a pipe it prints plain lines, breaks none and cuts no id short."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
