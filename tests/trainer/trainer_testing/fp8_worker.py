"""One rank of strategy_worker in which fp8 is computed by wider products, as no GPU is here.

`python -m trainer_testing.fp8_worker REQUESTS`.
"""

import json
import sys

import torch
from trainer.leaving import leave
from trainer.models import float8

from trainer_testing import strategy_worker

if __name__ == "__main__":
    torch.set_num_threads(1)
    float8.EMULATE = True
    strategy_worker.main([strategy_worker.RunRequest(**request) for request in json.loads(sys.argv[1])])
    leave(0)
