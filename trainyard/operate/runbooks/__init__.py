"""What an engineer on call does, one module a runbook: `scripts/runbooks/NAME`, a page each in docs/runbooks.

A diagnosing one looks at one job (`gather`), keeps what it saw in a folder, and says whether its own fault is there,
with the line or the figure that decided and the commands to go on with. An acting one makes a list of steps, and prints
them unless it is told `--yes`. `log_lines` and `figures` classify: pure functions of lines and of metrics.jsonl's rows.
"""
