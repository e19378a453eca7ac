"""What a person can get wrong or AWS can refuse, each with the exit code that the CLI returns for it.

A message is one line: what is wrong, where, what is allowed, how to mend it. Anything that is not one of
these is a bug of ours and keeps its traceback.
"""


class TrainyardError(Exception):
    """Base of every error that is shown to a person as one line, without a traceback."""

    exit_code = 1
    may_run = ""
    """The id of a job that was handed over before this: whether it runs nobody has said."""
    recorded = ""
    """The id of a new job whose record was written before this refused it: it is not submitted."""


class JobFailedError(TrainyardError):
    """The job, or a check that was asked for, ran and failed."""

    exit_code = 1


class InputError(TrainyardError, ValueError):
    """The input was wrong: a file, a flag, a value, a name."""

    exit_code = 2


class AwsRefusedError(TrainyardError):
    """AWS (or the emulator in its place) refused or could not be reached."""

    exit_code = 3


class AwsAwayError(AwsRefusedError):
    """AWS can't be reached, is overloaded or throttles: the same question may be answered a little later."""
