"""Tokens and model FLOPs a second, and the share of the device's peak (MFU), in both conventions that are in use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """What the planner knows of a job that its steps can be held against; None: it has no formula for it."""

    full_flops_per_token: float | None = None
    """6 FLOPs a weight and 12 x layers x width x sequence length for attention: PaLM (arXiv:2204.02311, appendix B),
    torchtitan and llm-foundry. An adapter's frozen weights have no gradient, 4 FLOPs each; attention's scores have no
    weights, and count in full."""
    causal_flops_per_token: float | None = None
    """The same with half of the attention scores, which a causal mask needs: NeMo. Up to 12% less."""
    peak_flops: float | None = None
    """Dense peak of one device in the job's precision, from its data sheet; None on CPU."""
    planned_bytes: float | None = None
    """The plan's memory at the peak of a step, on the worst rank."""
    planned_step_seconds: float | None = None
    """The plan's time of an optimizer step."""


def throughput(
    tokens: float, seconds: float, world_size: int, expected: Expected, *, num_steps: int
) -> dict[str, float | None]:
    """Of a window of steps: `tokens` of all ranks, without padding, in `seconds`; figures are per rank.

    `of_plan` is of the steps' own speed: a plan computes padding as tokens, as the machine does.
    """
    rate = tokens / seconds / world_size
    planned = expected.planned_step_seconds
    figures: dict[str, float | None] = {
        "tokens_per_second_per_rank": rate,
        "of_plan": None if planned is None else planned * num_steps / seconds,
    }
    flops = {"full": expected.full_flops_per_token, "causal": expected.causal_flops_per_token}
    for convention, per_token in flops.items():
        achieved = None if per_token is None else per_token * rate
        figures[f"model_tflops_{convention}"] = None if achieved is None else achieved / 1e12
        peak = expected.peak_flops
        figures[f"mfu_{convention}"] = None if achieved is None or peak is None else achieved / peak
    return figures
