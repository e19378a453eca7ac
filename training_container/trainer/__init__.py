"""The trainer: one process a rank, started by torchrun, on CPU (gloo) or GPU (nccl).

`python -m trainer --job JOB.yaml --output-dir DIR` runs a job from its spec. The loop (`trainer.loop`) is written
once; what differs between DDP, FSDP and DeepSpeed ZeRO lives in `trainer.strategies`, behind nine methods. Data,
checkpoints, metrics and signals never ask which engine runs. Every module but `__main__` and `entrypoint` takes a
`trainyard.spec.job.ResolvedJob`, in which nothing is left to decide.
"""
