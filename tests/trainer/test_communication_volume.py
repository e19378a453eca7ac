"""Every layout sends as many messages and bytes a step as its theory says, and the trainer adds one small one.

Counted is what reaches torch.distributed (communication_worker) of a two-layer Llama in float32, and compared with
closed forms, each with its source. A formula counts payloads: on a ring of N ranks an all-reduce of n bytes moves
2 n (N-1)/N over each rank's wire, an all-gather to n or a reduce-scatter of n bytes half of that.
"""

from pathlib import Path
from typing import Any

import pytest
from trainer.dry_run.trace import trace
from trainer_testing.communication_worker import Case, Counts, count
from trainer_testing.cut_families import model_of
from trainer_testing.families import FAMILIES
from trainer_testing.text_job import write_job
from trainer_testing.tiny import GLOBAL_BATCH, SEQUENCE_LENGTH, VOCAB_SIZE, tiny_job

from trainyard.planner.exchanges import sent_gradient_bytes
from trainyard.planner.layout import Layout

pytestmark = pytest.mark.slow

HIDDEN, INNER, LAYERS = 64, 128, 2
BYTES = 4
NORM = BYTES * HIDDEN
BLOCK = BYTES * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + 2 * NORM
"""Weights of a layer: queries and output (H x H each), keys and values (H x H/2 each), three of H x I, two norms."""
ENDS = BYTES * 2 * VOCAB_SIZE * HIDDEN + NORM
"""Embedding, head and the last norm."""
ALL = LAYERS * BLOCK + ENDS
SCALAR = 8
"""The gradient norm's square: float64."""

FULL = {"micro_batch_size": GLOBAL_BATCH}
MIXTRAL: dict[str, Any] = {**FAMILIES["Mixtral"]}
BALANCED = MIXTRAL | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
DELTAS: dict[str, Any] = model_of("qwen3_5_text")
"""Of four layers two have a delta rule."""

IN_TWO = (
    Case("ddp", "ddp", micro_batch_size=8),
    Case("ddp, 4 micro-batches", "ddp"),
    Case("fsdp", "fsdp", micro_batch_size=8),
    Case("fsdp, 4 micro-batches", "fsdp"),
    Case("tensor", parallelism={"tensor": 2}, **FULL),  # type: ignore[arg-type]
    Case("context", parallelism={"context": 2}, **FULL),  # type: ignore[arg-type]
    Case("context, deltas", model=DELTAS, parallelism={"context": 2}, document_masks=False, **FULL),  # type: ignore[arg-type]
    Case("pipeline", parallelism={"pipeline": 2}, micro_batch_size=4),
    Case("expert", model=MIXTRAL, parallelism={"data_shard": 2, "expert": 2}, micro_batch_size=8),
    *(
        Case(f"{axis}, {name}", model=model, parallelism={axis: 2}, micro_batch_size=8)
        for axis in ("pipeline", "context", "tensor")
        for name, model in (("experts", MIXTRAL), ("balanced experts", BALANCED))
    ),
    *(Case(f"zero{stage}", f"zero{stage}", micro_batch_size=8) for stage in (1, 2, 3)),
    *(Case(f"zero{stage}, 4 micro-batches", f"zero{stage}") for stage in (1, 2, 3)),
    *(Case(f"zero{stage}, bf16", f"zero{stage}", micro_batch_size=8, job={"precision": "bf16"}) for stage in (1, 2, 3)),
)


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Counts]]:
    """Counts of every case for two ranks, and of whole jobs of 4 and 8 steps."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = [
        Case(f"{layout}, {steps} steps", job_file=str(_job(folder / f"{layout}{steps}", layout, steps)))
        for layout in ("ddp", "fsdp")
        for steps in (4, 8)
    ]
    return count(2, [*IN_TWO, *jobs])


def _job(folder: Path, layout: str, steps: int) -> Path:
    return write_job(folder, layout, steps=steps, micro_batch_size=4)


SAME_AS_DRY = [case for case in IN_TWO if "expert" not in case.name and not case.name.startswith("zero")]
"""Of experts real tokens choose how much travels; of DeepSpeed a dry run tells no messages."""


@pytest.mark.parametrize("case", SAME_AS_DRY, ids=lambda case: str(case.name))
def test_a_dry_run_sends_the_same_messages(in_two: dict[str, list[Counts]], case: Case) -> None:
    """Kind by kind, as many and as large, on every rank."""
    job = tiny_job(
        case.strategy,
        2,
        model=case.model,
        parallelism=case.parallelism,
        micro_batch_size=case.micro_batch_size,
        document_masks=case.document_masks,
    )
    for rank, real in enumerate(in_two[case.name]):
        counts: Counts = {}
        for message in trace(job, rank)["messages"]:
            entry = counts.setdefault(message["name"], [0, 0])
            entry[0] += message["count"]
            entry[1] += message["bytes"]
        assert counts == real


def test_ddp_reduces_each_gradient_once_a_step(in_two: dict[str, list[Counts]]) -> None:
    """All-reduce of the gradients (Li et al., PyTorch Distributed, VLDB 2020, section 3): P bytes, in one bucket here.

    With four micro-batches too: three of them accumulate without a word (no_sync).
    """
    assert in_two["ddp"][0] == {"all_reduce": [1, ALL]}
    assert in_two["ddp, 4 micro-batches"][0] == {"all_reduce": [1, ALL]}


@pytest.mark.parametrize(("name", "num_micro_batches"), [("fsdp", 1), ("fsdp, 4 micro-batches", 4)])
def test_fsdp_gathers_twice_and_scatters_once(
    in_two: dict[str, list[Counts]], name: str, num_micro_batches: int
) -> None:
    """Weights for the forward and again for the backward pass, gradients once: 3 P a micro-batch (Rajbhandari et al.,
    ZeRO, SC 2020, section 7.2.2). The ends stay gathered between the passes, so theirs travel once. One unit a layer.
    """
    assert in_two[name][0] == {
        "all_gather": [num_micro_batches * (2 * LAYERS + 1), num_micro_batches * (2 * LAYERS * BLOCK + ENDS)],
        "reduce_scatter": [num_micro_batches * (LAYERS + 1), num_micro_batches * ALL],
        "all_reduce": [1, SCALAR],
    }


def test_hsdp_adds_one_all_reduce_of_the_shards() -> None:
    """As FSDP inside a replica; shards of gradients are then summed over replicas, once a step: P / shards bytes
    (Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2).
    """
    counts = count(4, [Case("hsdp", "hsdp")])["hsdp"][0]
    num_micro_batches, num_shards = 2, 2
    assert counts["all_gather"][1] == num_micro_batches * (2 * LAYERS * BLOCK + ENDS)
    assert counts["reduce_scatter"][1] == num_micro_batches * ALL
    assert counts["all_reduce"] == [LAYERS + 1 + 1, ALL // num_shards + SCALAR]


def test_tensor_parallel_sends_activations_eight_times_a_layer(in_two: dict[str, list[Counts]]) -> None:
    """With sequence parallelism a layer has, forward, an all-gather before and a reduce-scatter after attention and
    feed-forward each, and the reverse backward: 8 of B S H (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

    The ends: embedding and the head's input gradient are sums of B S H, hidden states are gathered after the last
    block and their split's gradient before the first; cross-entropy over a cut vocabulary sends three numbers a token
    (Shoeybi et al., arXiv:1909.08053, section 3); the norms' gradients meet once a step, with the ends' own none.
    """
    hidden = BYTES * GLOBAL_BATCH * SEQUENCE_LENGTH * HIDDEN
    counts = in_two["tensor"][0]
    assert counts["all_gather"] == [4 * LAYERS + 2, (4 * LAYERS + 2) * hidden]
    assert counts["reduce_scatter"] == [4 * LAYERS, 4 * LAYERS * hidden]
    numbers = 3 * BYTES * GLOBAL_BATCH * SEQUENCE_LENGTH
    assert counts["all_reduce"] == [6, 2 * hidden + numbers + 2 * LAYERS * NORM + SCALAR]
    assert set(counts) == {"all_gather", "reduce_scatter", "all_reduce"}


def test_context_parallel_gathers_keys_and_values(in_two: dict[str, list[Counts]]) -> None:
    """Forward, keys and values of the whole sequence (B S H_kv each) are gathered in every layer; backward, their
    gradients are scattered (the Llama 3 report, arXiv:2407.21783, section 3.3.2). Weights go as under FSDP.

    The positions, 8 bytes a token, are gathered once a micro-batch.
    """
    keys = BYTES * GLOBAL_BATCH * SEQUENCE_LENGTH * (HIDDEN // 2)
    positions = 8 * GLOBAL_BATCH * SEQUENCE_LENGTH
    assert in_two["context"][0] == {
        "all_gather": [4 * LAYERS + 1 + 1, LAYERS * (2 * keys + 2 * BLOCK) + ENDS + positions],
        "reduce_scatter": [3 * LAYERS + 1, LAYERS * 2 * keys + ALL],
        "all_reduce": [1, SCALAR],
    }


def test_context_parallel_trades_tokens_for_heads_where_layers_have_a_state(in_two: dict[str, list[Counts]]) -> None:
    """Each rank's own tokens of all heads for all tokens of its own heads, and back: two all-to-alls a layer forward,
    and their gradients' two backward (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509, section 3.2). There go
    queries, keys, values, a decay and a rate of each value's head, in one message; back comes what the state gives.
    """
    num_layers = DELTAS["layer_types"].count("linear_attention")
    key_heads, value_heads = DELTAS["linear_num_key_heads"], DELTAS["linear_num_value_heads"]
    values = value_heads * DELTAS["linear_value_head_dim"]
    there = 2 * key_heads * DELTAS["linear_key_head_dim"] + values + 2 * value_heads
    own_tokens = GLOBAL_BATCH * SEQUENCE_LENGTH // 2
    for rank in in_two["context, deltas"]:
        assert rank["all_to_all"] == [4 * num_layers, 2 * BYTES * own_tokens * (there + values) * num_layers]


def test_a_pipeline_sends_one_activation_each_way_a_micro_batch(in_two: dict[str, list[Counts]]) -> None:
    """B S H from stage to stage for every micro-batch, and as much gradient back (Narayanan et al., arXiv:2104.04473,
    section 3.2); nothing else but the gradient norm.
    """
    num_micro_batches = 4
    hidden = BYTES * 4 * SEQUENCE_LENGTH * HIDDEN
    for rank in in_two["pipeline"]:
        assert rank == {
            "send": [num_micro_batches, num_micro_batches * hidden],
            "receive": [num_micro_batches, num_micro_batches * hidden],
            "all_reduce": [1, SCALAR],
        }


@pytest.mark.parametrize(
    ("axis", "kind", "num_messages"), [("pipeline", "send", 1), ("context", "all_reduce", 1), ("tensor", "", 0)]
)
def test_the_balance_of_experts_is_two_numbers_an_expert(
    in_two: dict[str, list[Counts]], axis: str, kind: str, num_messages: int
) -> None:
    """A micro-batch: each way between stages, over the parts of a sequence, and nothing between matrices."""
    for plain, balanced in zip(in_two[f"{axis}, experts"], in_two[f"{axis}, balanced experts"], strict=True):
        kinds = {*plain, *balanced} - {"receive"}
        more = {
            each: [b - a for a, b in zip(plain.get(each, [0, 0]), balanced.get(each, [0, 0]), strict=True)]
            for each in kinds
        }
        found = {each: counts for each, counts in more.items() if counts != [0, 0]}
        tally = 8 * 2 * MIXTRAL["num_local_experts"]
        num_micro_batches = GLOBAL_BATCH // 8
        assert found == ({kind: [num_messages * num_micro_batches, tally * num_micro_batches]} if kind else {})


def test_expert_parallel_sends_each_routed_row_there_and_back(in_two: dict[str, list[Counts]]) -> None:
    """Two exchanges of (tokens x choices) rows of H, forward and backward, in every layer (Lepikhin et al., GShard,
    arXiv:2006.16668, section 3.2, without its padding), and how many rows will come: 8 bytes an expert.
    """
    layers, choices, experts = (
        MIXTRAL[name] for name in ("num_hidden_layers", "num_experts_per_tok", "num_local_experts")
    )
    rows = BYTES * GLOBAL_BATCH * SEQUENCE_LENGTH * choices * MIXTRAL["hidden_size"]  # over both ranks
    exchanges = [rank["all_to_all"] for rank in in_two["expert"]]
    assert [calls for calls, _ in exchanges] == [layers * (4 + 1)] * 2
    assert sum(sent for _, sent in exchanges) == layers * (4 * rows + 2 * 8 * experts)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_reduce_gradients_and_gather_weights(in_two: dict[str, list[Counts]], stage: int) -> None:
    """Gradients to their owners, new weights to all (ZeRO, section 7.2.1): a reduction to each owner of its part, the
    bytes of a reduce-scatter. Stage 1 reduces once a step, stage 2 after every micro-batch, because it keeps no whole
    gradients. DeepSpeed 0.19.8 would all-reduce, with twice the bytes on the wire (use_multi_rank_bucket_allreduce).
    """
    for name, num_reductions in ((f"zero{stage}", 1), (f"zero{stage}, 4 micro-batches", 1 if stage == 1 else 4)):
        counts = in_two[name][0]
        assert set(counts) == {"reduce", "all_reduce", "all_gather"}
        assert counts["reduce"] == [2 * num_reductions, num_reductions * ALL]
        assert counts["all_reduce"][1] == SCALAR
        assert counts["all_gather"][1] == ALL


@pytest.mark.parametrize(("name", "num_micro_batches"), [("zero3", 1), ("zero3, 4 micro-batches", 4)])
def test_zero_3_sends_no_more_than_three_times_the_weights(
    in_two: dict[str, list[Counts]], name: str, num_micro_batches: int
) -> None:
    """3 P a micro-batch at most (ZeRO, section 7.2.2): weights that stay below stage3_max_live_parameters are not
    gathered again, so a small model's travel once a step. Two scalars: the gradient norm and the overflow check.
    """
    counts = in_two[name][0]
    assert counts["reduce_scatter"] == [num_micro_batches, num_micro_batches * ALL]
    assert ALL <= counts["all_gather"][1] <= 2 * num_micro_batches * ALL
    assert counts["all_reduce"] == [2, 2 * SCALAR]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sends_gradients_of_16_bits_in_32(in_two: dict[str, list[Counts]], stage: int) -> None:
    """As the planner has it; weights travel in 16."""
    counts = in_two[f"zero{stage}, bf16"][0]
    layout = Layout(engine="deepspeed", library="trainyard", zero_stage=stage, precision="bf16")
    num_elements = ALL // BYTES
    assert counts["reduce_scatter" if stage == 3 else "reduce"][1] == sent_gradient_bytes(layout) * num_elements == ALL
    assert counts["all_gather"][1] == 2 * num_elements


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_the_trainer_itself_says_one_small_thing_a_step(in_two: dict[str, list[Counts]], layout: str) -> None:
    """The loss, the next batch's counts, signals and whether a checkpoint is late share one all-reduce."""
    engine = 1  # all-reduce of the engine itself: DDP's bucket, FSDP's gradient norm
    short, long = (in_two[f"{layout}, {steps} steps"][0] for steps in (4, 8))
    assert long["all_reduce"][0] - short["all_reduce"][0] == 4 * (engine + 1)
    # Anything else belongs to the start or the end of a job (ranks' figures are gathered after the last step).
    for kind in set(long) - {"all_reduce", "all_gather", "reduce_scatter"}:
        assert long[kind][0] == short[kind][0], f"{kind} at every step"
    if layout == "fsdp":
        bytes_a_step = (long["all_reduce"][1] - short["all_reduce"][1]) / 4
        assert bytes_a_step <= SCALAR + 256
