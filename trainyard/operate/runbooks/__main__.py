"""`scripts/runbooks/NAME [...]`, which is `python -m trainyard.operate.runbooks NAME [...]`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainyard.errors import InputError, TrainyardError
from trainyard.operate.runbooks.catalog import BY_NAME, RUNBOOKS
from trainyard.operate.runbooks.framework import Report, evidence_folder, keep
from trainyard.operate.runbooks.runbook import Context, Runbook

DEFAULT_ENVIRONMENT = "local"


EXIT_CODES = """exit codes: 0 nothing is wrong, or done (or only printed); 1 the fault is there, or a step failed; 2 the
input was wrong; 3 AWS refused (2 and 3: no step that changes something was begun)"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other command does."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def parser_of(runbook: Runbook) -> argparse.ArgumentParser:
    """Its command line."""
    parser = _Parser(
        prog=f"scripts/runbooks/{runbook.name}",
        description=f"{runbook.summary[:1].upper()}{runbook.summary[1:]}\nWhen, and what it looks at:"
        f" docs/runbooks/{runbook.name}.md",
        epilog=f"example: {runbook.example_words}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if runbook.subject == "job":
        parser.add_argument("job", nargs="?", metavar="JOB", help="the job's id, as `trainyard launch` printed it")
        parser.add_argument("--log", type=Path, action="append", metavar="FILE", help="more lines: a machine's dmesg")
        parser.add_argument("--tenant", "-t", help="the tenant, where the job's name doesn't tell")
    parser.add_argument(
        "--environment", "-e", default=DEFAULT_ENVIRONMENT, metavar="NAME|PATH", help="where; default: %(default)s"
    )
    parser.add_argument("--evidence", type=Path, metavar="FOLDER", help="keep what was seen there")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    if runbook.changes:
        group = parser.add_mutually_exclusive_group()
        group.add_argument("--dry-run", action="store_true", help="print the calls, and change nothing (the default)")
        group.add_argument("--yes", action="store_true", help="make the calls")
    runbook.more_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named one; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given else ""
    report: Report | None = None
    is_json = False
    try:
        if name not in BY_NAME:
            names = ", ".join(runbook.name for runbook in RUNBOOKS)
            raise InputError(f"runbook {name!r}: there is none of that name; there are: {names}")
        runbook = BY_NAME[name]
        options = parser_of(runbook).parse_args(given)
        is_json = options.json
        subject = getattr(options, "job", None) or getattr(options, "tenant", None) or options.environment
        report = Report(name, str(subject), evidence_folder(name, options.evidence))
        runbook.run(Context(options, report, _say))
        keep(report.folder, "report.json", report.document())
    except TrainyardError as error:
        if report is not None:
            report.error = error
            with contextlib.suppress(InputError):  # where nothing can be kept, that is the error
                keep(report.folder, "report.json", report.document())
            if report.may_have_changed or report.has_found:
                _print(report, is_json)
        print(f"trainyard: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code if report is None else report.exit_code
    _print(report, is_json)
    return report.exit_code


def _print(report: Report, is_json: bool) -> None:
    try:
        print(
            json.dumps(report.document(), indent=1, default=str) if is_json else "\n".join(report.lines()), flush=True
        )
    except BrokenPipeError:  # `| head` has read enough; the report lies in the evidence folder
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
