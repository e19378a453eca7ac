"""One of four ranks: a layer's experts spread over two, two copies of each, against the same experts whole.

`python -m trainer_testing.exchange_worker`: rank 0 prints the largest error of outputs and gradients by routing, among
them some that leave half of the ranks without a single token.
"""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from trainer.leaving import leave
from trainer.runtime import Runtime, distributed_runtime
from trainer.strategies import expert_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import MARK
from trainyard.spec.job import ParallelismSpec

NUM_RANKS, NUM_TOKENS, HIDDEN = 4, 6, 32
ROUTINGS = {"to the first": [0, 1], "to the last": [3, 2], "to both": [0, 3]}
"""Both choices of every token."""


def largest_error(whole: nn.Module, spread: nn.Module, choices: list[int], runtime: Runtime) -> float:
    """Over this rank's outputs and input gradients, and all weight gradients."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(NUM_RANKS, NUM_TOKENS, HIDDEN, generator=generator)
    weights = torch.rand(NUM_RANKS, NUM_TOKENS, 2, generator=generator)
    chosen = torch.tensor(choices).expand(NUM_TOKENS, 2)
    expected, ours = [], []
    for rank in range(NUM_RANKS):
        inputs = [part[rank].clone().requires_grad_() for part in (hidden, weights)]
        output = whole(inputs[0], chosen, inputs[1])
        output.square().sum().backward()
        if rank == runtime.rank:
            expected = [output, *(part.grad for part in inputs)]
            inputs = [part[rank].clone().requires_grad_() for part in (hidden, weights)]
            output = spread(inputs[0], chosen, inputs[1])
            output.square().sum().backward()
            ours = [output, *(part.grad for part in inputs)]
    for weight, sharded in zip(whole.parameters(), spread.parameters(), strict=True):
        assert isinstance(sharded.grad, DTensor)
        expected.append(weight.grad)
        ours.append(sharded.grad.full_tensor())
        weight.grad = sharded.grad = None
    errors = [(a - b).abs().max() for a, b in zip(expected, ours, strict=True) if a is not None and b is not None]
    assert len(errors) == len(ours)
    worst = torch.stack(errors).max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def main() -> None:
    """Every routing, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        torch.manual_seed(0)
        settings = dict(FAMILIES["Mixtral"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        spread = expert_parallel.expert_modules(model)[0]
        whole = copy.deepcopy(spread)
        mesh = expert_parallel.build_mesh(ParallelismSpec(data_shard=NUM_RANKS, expert=2), "cpu")
        expert_parallel.apply(model, mesh, MixedPrecisionPolicy(reduce_dtype=torch.float32))
        assert isinstance(spread, FSDPModule)
        spread.set_gradient_divide_factor(1.0)
        spread.set_force_sum_reduction_for_comms(True)
        errors = {name: largest_error(whole, spread, choices, runtime) for name, choices in ROUTINGS.items()}
        if runtime.is_first:
            print(MARK + json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()
    leave(0)
