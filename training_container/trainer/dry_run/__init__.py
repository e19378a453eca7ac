"""One rank of a job, of any size, built and stepped on this machine without its memory or its neighbours.

`trace.trace(job, rank)` builds the rank by the trainer's own code: the same strategy, model, loss and optimizer, over a
process group that talks to nobody, with tensors that have shapes and no values. One optimizer step is run, and every
allocation and every message of it is written down: `building` makes the rank, `batches` what it reads, `kernels` what
a GPU's kernels keep, `ledger` notes memory, `messages` collectives. `python -m trainer.dry_run` prints the result.

Nothing here has a formula: what `trainyard plan` says in closed form is checked against it, and shares no code with it.
"""
