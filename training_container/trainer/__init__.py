"""The trainer: one process a rank, started by torchrun, on CPU (gloo) or GPU (nccl).

`python -m trainer --job JOB.yaml --output-dir DIR` runs a job from its spec. The loop (`trainer.loop`) is written
once; what differs between DDP, FSDP and DeepSpeed ZeRO lives in `trainer.strategies`, behind nine methods. Data,
checkpoints, metrics and signals never ask which engine runs. Every module but `__main__` and `entrypoint` takes a
`trainyard.spec.job.ResolvedJob`, in which nothing is left to decide.
"""

import logging

from trainer import lean_imports

lean_imports.install()

# torchao comes in with fp8 (models/float8.py), and where transformers quantizes by it; no longer with every model.
# What it says then is of kernels for other machines, which nothing here uses (fp8 takes torch's own), and of a torch
# function that it will have to call differently some day.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant()" not in record.getMessage())
