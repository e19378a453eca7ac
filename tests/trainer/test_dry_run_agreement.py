"""Closed form and trace agree, rank by rank; and what our trainer need not keep, it doesn't.

Both are held against real steps in test_dry_run.py; benchmarks/planner_dry_run.py has the cases and prints the table.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trainer.dry_run.trace import OF_THE_MODEL, trace
from trainer.models import recomputation
from trainer_testing.agreement import STATIC, dry_run_cases
from trainer_testing.families import FAMILIES
from trainer_testing.tiny import GLOBAL_BATCH, MODEL, tiny_job

from trainyard.planner import resolve
from trainyard.planner.exchanges import num_gatherings
from trainyard.planner.families import shape_from_config
from trainyard.planner.layout import Layout, Recompute
from trainyard.planner.trainer_layers import TrainerLayers

CASES = dry_run_cases()
ACTIVATIONS = 0.10
OF_TWO_MOMENTS: frozenset[str] = frozenset()
"""One of them has layers gathered, the other a layer's activations: what each needs is within 5% of the other. None
since plans look at every unit in the forward pass."""
SHORT = ("fsdp", "fsdp-full", "ddp", "tiny:0", "quickstart:0", "hsdp", "mixtral-full", "deepseek-v3")
"""A second or two each."""


GEMMA_2 = {
    **{"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 32000},
}


@cache
def _agreement(name: str) -> Any:
    return CASES.agreement(CASES.CASES[name])


def test_some_cases_rows_are_written_among_the_others() -> None:
    """--write of one case left the table with its row alone."""
    page = CASES.PAGE.read_text(encoding="utf-8").split(CASES.BEGIN)[1].split(CASES.END)[0]
    assert CASES.merged(page, "").splitlines() == page.strip().splitlines()
    head = page.strip().splitlines()[:2]
    named = CASES.CASES["ddp"].words
    written = "\n".join([*head, f"| {named} | now |", "| of no case | now |"])
    merged = CASES.merged(page, written).splitlines()
    changed = [line for line in merged if line not in page]
    assert changed == [f"| {named} | now |"] and len(merged) == len(page.strip().splitlines())
    first = next(line for line in page.splitlines() if line.startswith(f"| {named} |"))
    assert CASES.merged(page.replace(first + "\n", ""), written).splitlines() == merged


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in CASES.CASES]
)
def test_closed_form_and_trace_agree(name: str) -> None:
    case = CASES.CASES[name]
    found = _agreement(name)
    if getattr(case.job.parallelism, "engine", "torch") == "deepspeed":  # cuts its state by its own code
        assert found.static is None
    else:
        assert found.static is not None and abs(found.static) < STATIC
    assert found.is_of_two_moments is (name in OF_TWO_MOMENTS)
    assert abs(found.activations) < ACTIVATIONS or found.is_of_two_moments


def _grown(model: dict[str, Any], attention: str, precision: str) -> tuple[float, float]:
    """Bytes that a layer keeps, by trace and by formula: what a third one adds to two."""
    found = []
    for layers in (2, 3):
        job = CASES.few_layers({"data_shard": 8}, model | {"num_hidden_layers": layers}, precision=precision)
        job = job.model_copy(update={"model": job.model.model_copy(update={"attention": attention})})
        agreed = CASES.agreement(CASES.Case("", job, 5))
        found.append((agreed.traced["activations"], agreed.planned["activations"]))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


SPREAD = {"data_shard": 8, "expert": 4}


@pytest.mark.parametrize(
    ("parallelism", "model", "length"),
    [
        ({"data_shard": 8}, CASES.SEVEN_BILLION | {"num_hidden_layers": 3}, 2048),
        ({"data_shard": 8}, CASES.MIXTRAL | {"num_hidden_layers": 3}, 2048),
        # Beside what experts on several ranks take to be gathered and reduced, only those of long sequences are worst.
        (SPREAD, CASES.MIXTRAL | {"num_hidden_layers": 3}, 8192),
    ],
    ids=["dense", "experts", "spread"],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_of_scores_that_are_written_out_are_counted(
    parallelism: dict[str, Any], model: dict[str, Any], length: int, recompute: str
) -> None:
    # Two fp32 tensors of the scores' size while a softmax is differentiated: with recomputation the worst moment.
    job = CASES.few_layers(parallelism, model, activation_checkpointing=recompute)
    eager = job.model.model_copy(update={"attention": "eager"})
    data = job.data.model_copy(update={"sequence_length": length})
    agreed = CASES.agreement(CASES.Case("", job.model_copy(update={"model": eager, "data": data}), 5))
    assert abs(agreed.activations) < ACTIVATIONS


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_scores_that_are_written_out_are_counted(precision: str) -> None:
    """Where the job asks for it, and for Gemma 2, which the trainer runs so unasked: its tanh is kept too."""
    traced, planned = _grown(CASES.SEVEN_BILLION, "eager", precision)
    assert planned == pytest.approx(traced, rel=0.01)
    heads, length, element = 8, 2048, 2 if precision == "bf16" else 4
    traced, planned = _grown(GEMMA_2, "auto", precision)
    traced_uncapped, uncapped = _grown(GEMMA_2 | {"attn_logit_softcapping": None}, "auto", precision)
    assert uncapped == pytest.approx(traced_uncapped, rel=0.01), "written out without caps, too"
    assert planned - uncapped == pytest.approx(heads * length * length * element, rel=0.01)
    assert planned == pytest.approx(traced, rel=0.01)


@pytest.mark.parametrize(
    ("parallelism", "tied"), [({"data_replicate": 8}, True), ({"data_replicate": 8}, False), ({"data_shard": 8}, False)]
)
def test_muon_leaves_the_models_ends_to_adamw(parallelism: dict[str, Any], tied: bool) -> None:
    """Two averages of each word's vector, not one: of small models with many words 45% of the optimizer's state."""
    model = CASES.GROUPED | {"num_hidden_layers": 2, "hidden_size": 1024, "tie_word_embeddings": tied}
    model |= {"intermediate_size": 4096, "num_attention_heads": 8}
    job = CASES.few_layers(parallelism, model, optimizer={"kind": "muon"})
    traced, planned = (getattr(CASES.agreement(CASES.Case("", job, 0)), name) for name in ("traced", "planned"))
    assert planned["optimizer"] == pytest.approx(traced["optimizer"], rel=0.001)


PHI3 = {
    **{"model_type": "phi3", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32064, "pad_token_id": 0},
}
LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def _adapted(model: dict[str, Any], targets: list[str], **training: Any) -> Any:
    job = CASES.adapted({"data_shard": 8}, "lora", model, **training)
    adapter = job.model.adapter.model_copy(update={"targets": tuple(targets), "rank": 64})
    changed = job.model_copy(update={"model": job.model.model_copy(update={"adapter": adapter})})
    return CASES.agreement(CASES.Case("", changed, 0))


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (PHI3, ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]),
        pytest.param(CASES.DEEPSEEK_V3, LATENTS, marks=pytest.mark.slow),
        pytest.param(CASES.DEEPSEEK_V2_LITE, ["q_proj", "kv_b_proj"], marks=pytest.mark.slow),
        # Two modules of one name in a layer, and one name that a model has once.
        pytest.param(CASES.GPT2, ["c_proj"], marks=pytest.mark.slow),
        pytest.param(CASES.GROUPED, ["q_proj", "v_proj", "lm_head"], marks=pytest.mark.slow),
        pytest.param(CASES.NEOX, ["query_key_value", "dense"], marks=pytest.mark.slow),
    ],
    ids=["phi3", "deepseek-v3", "deepseek-v2-lite", "gpt2", "head", "neox"],
)
def test_adapters_of_every_name_are_counted_by_their_own_sizes(model: dict[str, Any], targets: list[str]) -> None:
    # A head that has one gives whole logits: of more than one part, as they are made then.
    more = {"micro_batch_size": 2, "global_batch_size": 32} if "lm_head" in targets else {}
    found = _adapted(model, targets, **more)
    assert found.planned["optimizer"] == pytest.approx(found.traced["optimizer"], rel=0.001)
    assert abs(found.activations) < ACTIVATIONS


@pytest.mark.slow
def test_a_layer_with_one_matrix_for_queries_keys_and_values_keeps_it() -> None:
    found = CASES.agreement(CASES.Case("", CASES.few_layers({"data_shard": 8}, PHI3), 0))
    assert abs(found.activations) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("parallelism", [{"data_shard": 8}, {"data_replicate": 8}], ids=["fsdp", "ddp"])
def test_the_loss_of_whole_logits_is_made_in_parts(parallelism: dict[str, Any], size: int) -> None:
    """Of 16 bits: 14 bytes a logit were counted, of which one part's positions alone have them."""
    model = CASES.SEVEN_BILLION | {"num_hidden_layers": 2, "vocab_size": 128000}
    job = CASES.few_layers(parallelism, model, loss="logits", micro_batch_size=size, global_batch_size=64)
    found = CASES.agreement(CASES.Case("", job, 0))
    moving = [sum(each[name] for name in ("activations", "buffers")) for each in (found.planned, found.traced)]
    assert moving[0] == pytest.approx(moving[1], rel=ACTIVATIONS)


@pytest.mark.parametrize("name", ["hsdp", "mixtral-full", "deepseek-v3"])
def test_what_is_on_its_way_agrees_too(name: str) -> None:
    """Sums that wait for their copies are gradients, and spread experts stand three times while FSDP gathers them."""
    found = _agreement(name)
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=ACTIVATIONS)


def _peak(parallelism: dict[str, Any], rank: int = 0, world_size: int = 8, **training: Any) -> dict[str, Any]:
    return trace(resolve(CASES.few_layers(parallelism, **training), world_size=world_size), rank)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_tensor_ranks_exchange_as_often_a_layer_as_the_planner_says(recompute: Recompute) -> None:
    """Gatherings and scatterings of a layer's two blocks. What the model's ends send is the same at any depth."""

    def exchanges(layers: int) -> int:
        job = tiny_job(
            "tensor",
            2,
            model=MODEL | {"num_hidden_layers": layers},
            parallelism={"tensor": 2},
            activation_checkpointing=recompute,
            micro_batch_size=GLOBAL_BATCH,
        )
        messages = trace(job, 0)["messages"]
        return sum(item["count"] for item in messages if item["name"] in ("all_gather", "reduce_scatter"))

    layout = Layout(
        engine="torch", micro_batch=1, num_micro_batches=1, sequence_length=64, precision="bf16", recompute=recompute
    )
    assert exchanges(5) - exchanges(2) == 3 * 2 * num_gatherings(layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stated", "a_micro_batch"),
    [
        # Of one micro-batch: forward and again backward, or once for both.
        ({"data_shard": 4, "expert": 2}, "auto", 2),
        ({"data_shard": 4, "expert": 2}, False, 1),
        # For the next forward pass what the last backward one gathered is there.
        ({"data_shard": 4, "expert": 2, "pipeline": 2}, True, 1),
        # A stage's weights stay over a step's micro-batches, and its experts are most of them.
        ({"data_shard": 4, "expert": 2, "pipeline": 2}, "auto", 0),
    ],
)
def test_spread_experts_are_gathered_as_often_as_their_blocks(
    layout: dict[str, Any], stated: bool | str, a_micro_batch: int
) -> None:
    def gathered(global_batch: int) -> int:
        job = tiny_job(
            "product",
            4 * layout.get("pipeline", 1),
            model=FAMILIES["Mixtral"],
            parallelism=layout | {"fsdp": {"reshard_after_forward": stated}},
            micro_batch_size=1,
            global_batch_size=global_batch,
        )
        messages = trace(job, 0)["messages"]
        # Of the four ranks that share other weights two have the same experts.
        return sum(item["count"] for item in messages if item["ranks"] == 2 and item["name"] == "all_gather")

    num_layers = FAMILIES["Mixtral"]["num_hidden_layers"] // layout.get("pipeline", 1)
    assert gathered(24) - gathered(16) == 2 * num_layers * a_micro_batch


@pytest.mark.parametrize("parallelism", [{"data_shard": 8}, {"data_replicate": 8}])
def test_a_second_micro_batch_adds_no_more_than_gradients(parallelism: dict[str, Any]) -> None:
    """FSDP holds on to what it sent last, and DDP to sums beside its buckets, unless they are told better."""
    alone, two = (_peak(parallelism, global_batch_size=size) for size in (8, 16))
    more = two["peak_bytes"] - alone["peak_bytes"]
    # Of DDP's the buckets are there from the beginning; FSDP's shards come to be. Beside them, a loss of four bytes.
    assert more <= (two["gradients_bytes"] if "data_shard" in parallelism else 0) + 1024


def test_a_pipelines_last_rank_lets_go_of_what_it_received() -> None:
    layout = {"pipeline": 2, "data_shard": 1}
    few, many = (
        trace(tiny_job("product", 2, parallelism=layout, micro_batch_size=1, global_batch_size=count), 1)
        for count in (4, 6)
    )
    assert few["memory_bytes"]["buffers"] == many["memory_bytes"]["buffers"] > 0


def test_a_rank_makes_the_gradient_of_its_own_vocabulary_alone() -> None:
    model = MODEL | {"vocab_size": 65536, "num_key_value_heads": 4}
    whole = 65536 * MODEL["hidden_size"] * 4
    found = trace(tiny_job("product", 4, model=model, parallelism={"tensor": 4}, global_batch_size=4), 0)
    # A quarter of embedding and of head: gathered, and the gradients of both, in the moment of their reduction.
    moving = sum(found["memory_bytes"][name] for name in (*OF_THE_MODEL, "buffers"))
    assert moving < 1.6 * whole


def test_adapted_layers_share_their_input(tmp_path: Path) -> None:
    def activations(*targets: str) -> int:
        adapter = {"kind": "lora", "rank": 1, "alpha": 2, "targets": list(targets)}
        job = tiny_job("single", 1, source="unused", adapter=adapter, precision="bf16")
        spec = job.spec.model_copy(
            update={"model": job.spec.model.model_copy(update={"source": None, "config": MODEL})}
        )
        found = trace(job.model_copy(update={"spec": spec}), 0)
        return int(sum(found["memory_bytes"][name] for name in OF_THE_MODEL))

    one_hidden_state = 2 * 24 * MODEL["hidden_size"] * 2
    assert activations("q_proj", "k_proj", "v_proj") - activations("v_proj") < one_hidden_state


def test_selective_recomputation_keeps_no_blocks_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def activations() -> int:
        found = _peak({"data_shard": 8}, activation_checkpointing="selective", global_batch_size=16)
        return int(sum(found["memory_bytes"][name] for name in OF_THE_MODEL))

    ours = activations()
    monkeypatch.setattr(recomputation, "_mark_last_product", lambda _: None)
    one_product = 2048 * 4096 * 2
    assert activations() - ours >= 2 * one_product


@pytest.mark.slow
def test_selective_recomputation_keeps_no_attention_that_drops() -> None:
    """The plan counted it as kept, which the trainer's selection runs again."""
    sizes = MODEL | {"num_hidden_layers": 8, "head_dim": 128}

    def activations(share: float) -> tuple[float, float]:
        model = sizes | {"attention_dropout": share}
        # No mask, and no copies of keys beside it: the last layer, whole again, would have them.
        job = tiny_job(
            "single",
            1,
            model=model,
            activation_checkpointing="selective",
            precision="bf16",
            document_masks=False,
        )
        layout = Layout(
            library="trainyard",
            micro_batch=job.micro_batch_size,
            sequence_length=24,
            precision="bf16",
            recompute="selective",
        )
        found = trace(job, 0)["memory_bytes"]
        # Most is there when the last layer is whole again, and the others keep what they keep.
        planned = TrainerLayers(shape_from_config(model), layout).kept_bytes * 7
        return planned, sum(found[name] for name in OF_THE_MODEL)

    (kept, traced_kept), (dropped, traced_dropped) = activations(0.0), activations(0.1)
    assert kept - dropped == pytest.approx(traced_kept - traced_dropped, rel=0.01)
    assert kept - dropped > 0.1 * kept
