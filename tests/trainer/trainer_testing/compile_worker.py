"""One rank of strategy_worker in which blocks are compiled by another backend.

`python -m trainer_testing.compile_worker BACKEND REQUESTS`.
"""

import json
import sys

import torch
from torch._dynamo.utils import counters
from trainer.leaving import leave
from trainer.models import float8
from trainer.strategies import compiled

from trainer_testing import strategy_worker

if __name__ == "__main__":
    torch.set_num_threads(1)
    compiled.BACKEND = sys.argv[1]
    float8.EMULATE = True
    strategy_worker.main([strategy_worker.RunRequest(**request) for request in json.loads(sys.argv[2])])
    print(f"GRAPHS {counters['stats']['unique_graphs']}", flush=True)
    leave(0)
