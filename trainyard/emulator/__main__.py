"""`python -m trainyard.emulator start|stop|status|serve|types`."""

import argparse
import json
import sys
from pathlib import Path

from trainyard.emulator.daemon import find, start, stop
from trainyard.emulator.info import DEFAULT_STATE_DIR
from trainyard.errors import InputError, TrainyardError


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; the exit code is 0, or the one of the error that is shown as one line."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard.emulator", description="AWS on this machine, as a daemon on loopback."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("start", "start the daemon, or find the one that runs"),
        ("stop", "stop it and every job process"),
        ("status", "say whether it runs (exit 1: no)"),
        ("serve", "be the daemon, in the foreground"),
        ("types", "list the CloudFormation types it knows and what stands behind each"),
    ):
        child = verbs.add_parser(verb, help=text)
        child.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR)
        if verb in ("start", "serve"):
            child.add_argument("--port", type=int, default=None, help="default: any free one")
            child.add_argument("--idle-exit-seconds", type=float, default=1800.0, help="0: never")
            child.add_argument(
                "--training-argv", default=None, help="JSON list: run this in place of the container's entrypoint"
            )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.verb == "start":
        info = start(
            options.state_dir,
            port=options.port,
            idle_exit_seconds=options.idle_exit_seconds,
            training_argv=_argv(options.training_argv),
        )
        print(json.dumps(info.public(), indent=2))
    elif options.verb == "stop":
        print("stopped" if stop(options.state_dir) else "no emulator ran")
    elif options.verb == "status":
        found = find(options.state_dir)
        print(json.dumps(found.public(), indent=2) if found else f"no emulator runs in {options.state_dir}")
        return 0 if found else 1
    elif options.verb == "types":
        from trainyard.emulator.cloudformation.catalogue import describe_types

        for name, backing in describe_types().items():
            print(f"{backing:14} {name}")
    else:
        from trainyard.emulator.server import serve

        serve(
            options.state_dir,
            port=options.port or 0,
            idle_exit_seconds=options.idle_exit_seconds,
            training_argv=_argv(options.training_argv),
        )
    return 0


def _argv(text: str | None) -> list[str] | None:
    if text is None:
        return None
    try:
        argv = json.loads(text)
    except ValueError:
        argv = None
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise InputError(f'--training-argv {text}: must be a JSON list of strings, e.g. ["python", "job.py"]')
    return argv


if __name__ == "__main__":
    sys.exit(main())
