"""How every process of a job speaks: whole lines, so that readers of the log can match on them."""

import sys


def say(line: str) -> None:
    """One line on stdout, in a single write: print() makes two on an unbuffered stdout, and ranks share one pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
