"""`python -m trainer.dry_run --resolved-job JOB.json --rank R`: one rank's step, traced here, as one line of JSON.

`trainyard plan --dry-run` runs it. Exit codes: 0 done; 1 a launch of the job would fail so; 2 the input was wrong.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from trainyard.errors import TrainyardError
from trainyard.spec.job import load_resolved


def main(arguments: Sequence[str] | None = None) -> int:
    """Traces one rank; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.dry_run",
        description="Build one rank of a job here, without its memory or its neighbours, and trace one step.",
        epilog="example: python -m trainer.dry_run --resolved-job resolved_job.json --rank 127",
    )
    parser.add_argument("--resolved-job", type=Path, required=True, help="resolved job (JSON)")
    parser.add_argument("--rank", type=int, default=0, help="which rank (default: 0)")
    parser.add_argument("--model-config", help="the Hugging Face configuration (JSON) of a source that is not here")
    options = parser.parse_args(arguments)
    try:
        job = load_resolved(options.resolved_job)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        from trainer.dry_run.building import with_configuration  # torch takes seconds: a wrong job is refused first
        from trainer.dry_run.trace import trace

        stated = json.loads(options.model_config) if options.model_config else None
        print(json.dumps(trace(with_configuration(job, stated), options.rank)))
    except TrainyardError as error:
        sys.stderr.write(f"trainyard: {' '.join(str(error).split())}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
