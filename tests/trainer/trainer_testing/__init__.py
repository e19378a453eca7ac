"""What the trainer's tests share: ranks on this machine, a tiny job, and the workers that ranks run."""
