"""One of two ranks: an embedding cut by vocabulary and the head that is tied to it, against the same ones whole.

`python -m trainer_testing.vocabulary_worker`: rank 0 prints, by padding row, the largest errors of the looked-up rows,
of the logits and of the weight's gradient.
"""

import copy
import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from trainer.leaving import leave
from trainer.runtime import distributed_runtime
from trainer.strategies import tensor_parallel

from trainer_testing.strategy_worker import MARK

NUM_RANKS, NUM_ROWS, HIDDEN = 2, 8, 4
IDS = [[0, 1, 4, 5, 7, 7, 3]]
"""Rows of both ranks, one of them twice, and one row (2, 6) of each that nothing asks for."""
PADDING = (None, 0, 1, NUM_ROWS // 2, 5, NUM_ROWS - 1)
"""None; first, middle and last rows of either rank."""


def errors(padding: int | None) -> dict[str, float]:
    """Largest differences after two backward passes that add up."""
    torch.manual_seed(0)
    whole = nn.Embedding(NUM_ROWS, HIDDEN, padding_idx=padding, dtype=torch.float64)
    nn.init.normal_(whole.weight)  # the padding row too: what it looks up must be its own
    embedding = copy.deepcopy(whole)
    head = nn.Linear(HIDDEN, NUM_ROWS, bias=False)
    head.weight = embedding.weight
    text = SimpleNamespace(vocab_size=NUM_ROWS)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: head,
    )
    tensor_parallel._cut_vocabulary(model, init_device_mesh("cpu", (NUM_RANKS,)))
    assert head.weight is embedding.weight, "tied weights stay one"
    ids = torch.tensor(IDS)
    of_rows, of_logits = torch.randn(*ids.shape, HIDDEN).double(), torch.randn(*ids.shape, NUM_ROWS).double()
    for _ in range(2):
        rows, expected_rows = embedding(ids), whole(ids)
        logits, expected_logits = head(rows), expected_rows @ whole.weight.T
        ((rows * of_rows).sum() + (logits * of_logits).sum()).backward()
        ((expected_rows * of_rows).sum() + (expected_logits * of_logits).sum()).backward()
    assert isinstance(embedding.weight.grad, DTensor) and whole.weight.grad is not None
    pairs = {
        "rows": (rows, expected_rows),
        "logits": (logits, expected_logits),
        "gradient": (embedding.weight.grad.full_tensor(), whole.weight.grad),
    }
    return {name: float((ours - expected).detach().abs().max()) for name, (ours, expected) in pairs.items()}


def main() -> None:
    """Every padding row, in one process group."""
    with distributed_runtime(cpu_threads=1) as runtime:
        found = {str(padding): errors(padding) for padding in PADDING}
        if runtime.is_first:
            print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    leave(0)
