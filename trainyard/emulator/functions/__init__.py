"""Lambda functions that really run: a function's own code in a process of its own, as its own role.

- `bootstrap`: the process: what Lambda's Python runtime does between an event and a handler's answer.
- `runs`: functions to processes: role, environment, code, time limit, log.
- `api`: Lambda's Invoke in moto, answered by these runs.

A function sees the standard library, boto3 and what its package holds, and no variable of this machine: what is
missing in the package is missing here too. The boto3 is this environment's, the Python the one that runs here, both
perhaps newer or older than Lambda's; memory and concurrency are not limited.
"""
