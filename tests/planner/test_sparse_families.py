"""Families whose attention chooses or compresses what it sees: sizes, what a token sees, and what is refused."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import predict, timing
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.plan import plan
from trainyard.planner.predict import Question, understand
from trainyard.planner.sparse_attention import Indexer
from trainyard.planner.stages import stage_params, stages
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import step_time
from trainyard.spec.job import JobSpec

Counted = Callable[[dict[str, Any]], int]

V4, V32, GLM = "deepseek_v4", "deepseek_v32", "glm_moe_dsa"
SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500, "num_hidden_layers": 4}
SMALL |= {"moe_intermediate_size": 40, "n_routed_experts": 6, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "stated",
    [
        {"model_type": V32},
        {"model_type": V32, "index_n_heads": 3, "index_head_dim": 32, "first_k_dense_replace": 0},
        {"model_type": V32, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        {"model_type": GLM, "index_topk_freq": 2},
        {"model_type": GLM, "index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"model_type": GLM, "index_topk_pattern": "FSSF"},
        {"model_type": GLM, "indexer_types": ["full", "shared", "shared", "shared"]},
        {"model_type": V4, "head_dim": 32, "o_groups": 2, "o_lora_rank": 24, "q_lora_rank": 20},
        {"model_type": V4, "compress_ratios": [0, 4, 128, 4, 0]},
        {"model_type": V4, "layer_types": ["sliding_attention"] * 3 + ["compressed_sparse_attention"]},
        {"model_type": V4, "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 16}},
        {"model_type": V4, "compress_rate_csa": 2, "compress_rate_hca": 64},
        {"model_type": V4, "hc_mult": 2, "index_n_heads": 5, "index_head_dim": 16},
        {"model_type": V4, "num_hidden_layers": 1},
    ],
    ids=str,
)
def test_parameters_are_those_of_transformers(stated: dict[str, Any], real_parameters: Counted) -> None:
    config = {**SMALL, **stated}
    assert shape_from_config(config).params == real_parameters(config)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("deepseek-v4-flash", 284, 13), ("deepseek-v4-pro", 1600, 49), ("glm-5", 744, 40), ("deepseek-v3.2", 671, 37)],
)
def test_known_ones_have_the_sizes_that_their_makers_state(name: str, billions: float, active: float) -> None:
    """Of active parameters some leave the embedding out, which nobody is multiplied with."""
    shape = shape_of_known(name)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.02)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=0.07)


@pytest.mark.parametrize(("rate", "chosen", "length"), [(1, 64, 500), (4, 16, 512), (4, 600, 2048), (2, 1, 10)])
def test_the_mean_of_what_a_token_sees_is_that_of_all_tokens(rate: int, chosen: int, length: int) -> None:
    counted = sum(min(chosen, (token + 0.5) / rate) for token in range(length)) / length
    indexer = Indexer(heads=1, head_dim=1, chosen=chosen, layers=1, rate=rate)
    assert indexer.mean_span(length) / 2 == pytest.approx(counted, rel=0.02)


def test_more_positions_never_cost_a_token_less_and_few_are_seen_of_many() -> None:
    shape, lengths = shape_of_known("deepseek-v4-flash"), [2**power for power in range(7, 21)]
    spans = [shape.mean_span(length) for length in lengths]
    assert spans == sorted(spans)
    # 20 of 43 layers see an entry of 128 positions for each of 128, twice as causality isn't counted.
    assert spans[-1] / lengths[-1] < 0.01
    indexed, plain = shape_of_known("deepseek-v3.2"), shape_of_known("deepseek-v3")
    assert indexed.mean_span(2048) == plain.mean_span(2048)
    assert indexed.mean_span(131072) < 4096


REQUEST = {"model": "deepseek-v4-flash", "gpu": "GB300", "gpus": 128, "ep": 64, "seq": 4096, "micro_batch": 1}
REQUEST |= {"global_batch": 2048, "framework": "megatron-core", "precision": "fp8", "sharding": "zero1"}


def test_residual_streams_and_recomputation_are_counted() -> None:
    """With all recomputed a layer keeps what goes in: four streams; and its streams' passes take time."""
    kept = predict({**REQUEST, "recompute": "full"})
    one_stream = 43 * 4096 * 4096 * 2 / 2**30
    assert kept["activation_gib"] > 4 * one_stream
    assert kept["activation_gib"] < predict(REQUEST)["activation_gib"]


def test_a_longer_sequence_costs_a_v4_less_than_a_model_that_sees_it_all() -> None:
    def slowdown(model: str) -> float:
        short, long = (
            predict({**REQUEST, "model": model, "seq": length, "global_batch": 128 * 65536 // length})
            for length in (4096, 65536)
        )
        return float(long["step_seconds"] / short["step_seconds"])

    assert slowdown("deepseek-v4-flash") < 1.5 < slowdown("deepseek-v3")


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v3.2", "glm-5.2"])
def test_a_rank_holds_no_more_with_more_ranks(name: str) -> None:
    draws = random.Random(7)
    for _ in range(6):
        tensor, pipeline = draws.choice([1, 2, 4]), draws.choice([1, 2])
        request = {**REQUEST, "model": name, "tp": tensor, "pp": pipeline, "gpus": 512, "micro_batch": 1}
        state = predict(request)["model_state_gib"]
        assert predict({**request, "tp": 2 * tensor})["model_state_gib"] <= state
        assert predict({**request, "pp": 2 * pipeline})["model_state_gib"] <= state


@pytest.mark.parametrize(
    "framework", ["transformers", "accelerate with transformers", "DeepSpeed", "litgpt", "unsloth"]
)
def test_a_framework_that_writes_scores_out_is_refused_in_one_line(framework: str) -> None:
    with pytest.raises(InputError, match=r"^framework '.*': writes all scores .* name a framework with kernels"):
        predict({**REQUEST, "framework": framework})


def test_our_own_trainers_job_is_planned_by_a_dry_run(job: Callable[..., JobSpec]) -> None:
    with pytest.raises(NotCoveredError, match=r"'deepseek_v4': transformers writes .*; trainyard plan JOB --dry-run"):
        plan(job(model={"source": "deepseek-v4-flash"}))
    with pytest.raises(NotCoveredError, match="'glm_moe_dsa'"):
        plan(job(model={"source": None, "config": {"model_type": GLM}}))


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"model_type": V4, "compress_ratios": [0, 3, 4, 4]}, "compress_ratios: must be a list of 0, 4, 128"),
        ({"model_type": V4, "layer_types": ["full_attention"] * 4}, "layer_types: must be a list of sliding_attention"),
        ({"model_type": V4, "layer_types": []}, "layer_types: must be a list of"),
        ({"model_type": V4, "o_groups": 3}, "o_groups: must divide all heads' width"),
        ({"model_type": V4, "compress_rates": [4]}, "compress_rates: must be a mapping"),
        ({"model_type": V4, "sliding_window": 0}, "sliding_window: must be at least 1"),
        ({"model_type": V4, "hc_mult": 0}, "hc_mult: must be at least 1"),
        ({"model_type": V4, "index_topk": 0}, "index_topk: must be at least 1"),
        ({"model_type": V32, "index_topk": "many"}, "index_topk: must be a whole number"),
        ({"model_type": V32, "q_lora_rank": None}, "q_lora_rank: must be at least 1"),
        ({"model_type": GLM, "indexer_types": ["full"]}, "indexer_types: must have one entry for each of 4 layers"),
        ({"model_type": GLM, "index_topk_pattern": "FSXF"}, "index_topk_pattern: must be a list of full and shared"),
        ({"model_type": GLM, "index_topk_pattern": "FF"}, "index_topk_pattern: must have one entry for each of 4"),
        ({"model_type": V4, "compress_ratios": [[0], 4, 4, 4]}, "compress_ratios: must be a list of 0, 4, 128"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_one_line(stated: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"^model.config.{said}") as caught:
        shape_from_config({**SMALL, **stated})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v3.2", "glm-5.2"])
def test_a_rank_that_is_alone_holds_all_parameters(name: str) -> None:
    alone = {"model": name, "gpu": "GB300", "gpus": 1, "micro_batch": 1, "framework": "megatron-core", "mtp_layers": 0}
    question = understand(alone)
    (stage,) = stages(question.shape, question.layout)
    assert stage_params(question.shape, question.layout, stage).total == pytest.approx(
        question.shape.params,
        abs=question.shape.hidden,  # the last norm
    )


def _elementwise(question: Question, **changes: Any) -> float:
    """Seconds of a layer's forward pass that go to what is element by element, with other streams."""
    assert question.shape.compression is not None
    compression = dataclasses.replace(question.shape.compression, **changes)
    shape = dataclasses.replace(question.shape, compression=compression)
    rank = timing._Rank(shape, question.layout, question.device, question.links, DEFAULT_CONSTANTS)
    ((_, work, _),) = rank.layers
    return work.elementwise


def test_each_block_reads_and_adds_to_all_streams() -> None:
    """To be weighed, joined and mixed, three times read and once written, by attention and by the experts' block."""
    question = understand(REQUEST)
    layout, each = question.layout, DEFAULT_CONSTANTS.passes_fused * 2 * question.shape.hidden
    moved = 2 * 4 * 3 * each * layout.tokens_per_micro_batch
    bandwidth = question.device.memory_tb_per_second * 1e12 * DEFAULT_CONSTANTS.bandwidth_efficiency
    assert _elementwise(question) - _elementwise(question, streams=1) == pytest.approx(moved / bandwidth)


def test_choosing_among_many_positions_takes_time_itself() -> None:
    """Every token is scored against all before it, whatever it then sees."""
    question = understand({**REQUEST, "model": "deepseek-v3.2", "seq": 131072, "gpus": 256, "global_batch": 256})
    assert question.shape.indexer is not None
    few = dataclasses.replace(question.shape.indexer, heads=1)
    seconds = [
        step_time(shape, question.layout, question.device, question.links).forward
        for shape in (question.shape, dataclasses.replace(question.shape, indexer=few))
    ]
    assert seconds[0] > 1.5 * seconds[1]


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v3.2", 4), ("deepseek-v4-flash", 4), ("glm-5", 8)])
def test_a_model_cut_short_chooses_in_as_few_layers(name: str, layers: int) -> None:
    """As its own configuration of so many layers, to one of each kind."""
    cut = understand({**REQUEST, "model": name, "layers": layers}).shape
    own = shape_from_config({**KNOWN_CONFIGS[name], "num_hidden_layers": layers})
    assert cut.indexer is not None and own.indexer is not None
    assert abs(cut.indexer.layers - own.indexer.layers) <= 1
    if cut.compression is not None and own.compression is not None:
        assert cut.compression.chosen_layers + cut.compression.heavy_layers <= layers
        assert abs(cut.compression.heavy_layers - own.compression.heavy_layers) <= 1
