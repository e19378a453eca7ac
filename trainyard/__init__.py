"""trainyard: the torch-free toolkit that app.py, the CLI and the container's entrypoint share.

Rooms: `spec` (typed models), `hardware` (facts and prices), `planner` (memory, time, cost), `launch`
(spec -> running job), `isolation` (the proof that no tenant reaches another), `operate` (runbooks as functions),
`emulator` (AWS on this machine), `cli` (the `trainyard` command). Nothing here imports torch, aws_cdk or stacks.
"""

__version__ = "0.1.0"
