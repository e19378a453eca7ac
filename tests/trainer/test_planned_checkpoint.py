"""A checkpoint has the size that the plan says: what a model's parameters and its optimizer's state hold, is saved."""

from typing import Any

import pytest
from trainer.models.build import build_model
from trainer.optimizers.build import build_optimizer, moments_of
from trainer_testing.families import FAMILIES
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.planner.formulas import formulas_of

AVERAGED = {"average_decay": 0.99}


@pytest.mark.parametrize(
    ("optimizer", "precision", "each"),
    [
        ({"kind": "adamw"}, "bf16", 12),
        (AVERAGED, "bf16", 16),
        ({"kind": "adamw"}, "fp64", 24),
        ({"kind": "adamw_8bit"} | AVERAGED, "fp32", 16),
        ({"kind": "adafactor"}, "bf16", 4),
        ({"kind": "adafactor"} | AVERAGED, "bf16", 8),
        ({"kind": "sgd"}, "bf16", 8),
        ({"kind": "sgd", "momentum": 0.0} | AVERAGED, "bf16", 8),
        ({"kind": "sgd", "momentum": 0.0}, "bf16", 4),
        ({"kind": "muon"}, "bf16", None),
    ],
)
def test_what_is_saved_of_a_parameter(optimizer: dict[str, Any], precision: str, each: int | None) -> None:
    """Within the norms and the rows and columns of small matrices, which the plan takes for nothing."""
    # Of muon embedding and head count apart, and here they are a third of the model.
    wide = FAMILIES["Llama"] | {"hidden_size": 128, "vocab_size": 512 if each is None else VOCAB_SIZE}
    job = tiny_job("single", 1, optimizer=optimizer, model=wide, precision=precision)
    model = build_model(job, vocab_size=wide["vocab_size"])
    built = build_optimizer(model, job)
    kept = list(model.parameters())
    kept += [tensor for parameter in model.parameters() for tensor in moments_of(built, parameter).values()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    planned = formulas_of(job.spec).saved
    assert planned.params == sum(parameter.numel() for parameter in model.parameters())
    assert planned.params * planned.bytes_per_param == pytest.approx(held, rel=0.05)
    if each is not None:
        assert planned.bytes_per_param == each
