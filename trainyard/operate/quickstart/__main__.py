"""`python -m trainyard.operate.quickstart`: options, interruption, exit codes."""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from trainyard.errors import TrainyardError
from trainyard.launch.session import checkout_root, state_root
from trainyard.operate.quickstart.flow import run
from trainyard.operate.quickstart.options import Options
from trainyard.spec.checkpoint_names import why_not_here


def main() -> int:
    """0: everything held; 1: a claim did not hold; 2, 3: bad input, AWS refused; 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart",
        description="Deploy two tenants on AWS on this machine, train, survive a spot reclaim, prove isolation.",
        epilog="example: scripts/quickstart --seed 7",
    )
    parser.add_argument("--seed", type=int, default=1234, help="chooses the step of the spot reclaim (default 1234)")
    parser.add_argument("--port", type=int, default=None, help="the emulator's port (default: any free one)")
    parser.add_argument("--environment", type=_path, default=checkout_root() / "environments/local.yaml")
    parser.add_argument("--job", type=_path, default=checkout_root() / "jobs/quickstart.yaml")
    parser.add_argument("--output-dir", type=_path, help="default: in the state folder")
    arguments = parser.parse_args()
    # SIGTERM takes the same way out as Ctrl-C: what this run started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    console = Console(stderr=False, width=None if sys.stdout.isatty() else 160)
    try:
        arguments.output_dir = arguments.output_dir or state_root() / "quickstart"
        report = run(Options(checkout=checkout_root(), state_dir=state_root(), **vars(arguments)), console)
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "trainyard: stopped, with everything that this run started; scripts/quickstart starts again",
            file=sys.stderr,
        )
        return 130
    return 0 if report.passed else 1


def _path(text: str) -> Path:
    """As the caller means it: what the quickstart runs, runs in the checkout."""
    if (why := why_not_here(Path(text))) is not None:
        raise argparse.ArgumentTypeError(f"{text}: {why}")
    return Path(text).resolve()


if __name__ == "__main__":
    sys.exit(main())
