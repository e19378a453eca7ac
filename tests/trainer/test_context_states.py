"""Layers with a state along the sequence, cut over context ranks: which are known, what divides them, what travels.

That they are one process is `test_cut_families`'.
"""

from typing import Any

import pytest
import torch
from torch import nn
from trainer.models.attention import attention_of
from trainer.models.build import build_model
from trainer.models.facts import facts_of
from trainer.strategies import check_supported, context_states
from trainer.strategies.context_parallel import WITHOUT_ATTENTION
from trainer.strategies.context_states import CONVOLUTION, DELTA_RULES, STATE_SPACE, recurrence_of
from trainer_testing.cut_families import model_of
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from transformers import CONFIG_MAPPING

from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec
from trainyard.spec.support import CONTEXT_FAMILIES, STATE_HEADS, ModelFacts, context_obstacle, state_heads


class Axis:
    """Two ranks, of which nothing is asked."""

    def get_group(self) -> None:
        """No group."""

    def get_local_rank(self) -> int:
        """The first."""
        return 0

    def size(self) -> int:
        """Both."""
        return 2


KINDS = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"), STATE_SPACE),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), CONVOLUTION),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), DELTA_RULES[0]),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), DELTA_RULES[1]),
}


@pytest.mark.parametrize("family", sorted(STATE_HEADS))
def test_the_code_of_each_family_is_of_a_known_kind(family: str) -> None:
    """And has a convolution in every layer of `context_states`, by which they are found."""
    model = build_model(tiny_job("single", 1, model=model_of(family), document_masks=False), vocab_size=VOCAB_SIZE)
    mixers = [each for each in model.modules() if any(isinstance(child, nn.Conv1d) for child in each.children())]
    assert mixers and {recurrence_of(each) for each in mixers} == {KINDS[family]}
    assert (family in WITHOUT_ATTENTION) == (getattr(model.config, "num_attention_heads", None) is None)


@pytest.mark.parametrize("family", sorted(STATE_HEADS))
def test_heads_that_a_configuration_leaves_open_are_the_librarys(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    stated = {"num_attention_heads": config.num_attention_heads} if family == "olmo_hybrid" else {}
    known = state_heads(family, stated.get)
    assert known == state_heads(family, lambda name: getattr(config, name, None))
    assert known.keys() == STATE_HEADS[family].keys()
    job = tiny_job("single", 1, model=model_of(family), document_masks=False)
    assert facts_of(job).state_heads == state_heads(family, model_of(family).get)


def test_what_such_a_model_runs_is_told() -> None:
    job = tiny_job("context2", 2, model=model_of("lfm2"), parallelism={"context": 2}, document_masks=False)
    told = attention_of(build_model(job, vocab_size=VOCAB_SIZE), job, torch.device("cpu"))
    assert told.startswith("sdpa over keys and values of 2 ranks (parallelism.context; layers with a state")


def test_kimis_heads_are_found_where_it_publishes_them() -> None:
    config = {"linear_attn_config": {"num_heads": 6, "head_dim": 128}}
    assert state_heads("kimi_linear", config.get) == {"linear_num_heads": 6}
    wrong: dict[str, Any] = {"linear_attn_config": 5}
    assert state_heads("kimi_linear", wrong.get) == {"linear_num_heads": 32}, "transformers says what is wrong with it"


@pytest.mark.parametrize(
    ("family", "heads", "layout", "told"),
    [
        ("bamba", {"mamba_n_heads": 128, "mamba_n_groups": 1}, {"context": 8}, None),
        ("nemotron_h", {"mamba_num_heads": 128, "n_groups": 8}, {"context": 16}, None),
        (
            "nemotron_h",
            {"mamba_num_heads": 96, "n_groups": 3},
            {"context": 2},
            "2 does not divide the model's n_groups",
        ),
        ("bamba", {"mamba_n_heads": 12, "mamba_n_groups": 1}, {"context": 8}, "8 does not divide the model's mamba_n"),
        ("qwen3_next", {"linear_num_key_heads": 16}, {"context": 8, "tensor": 2}, None),
        ("qwen3_next", {"linear_num_key_heads": 16}, {"context": 8, "tensor": 4}, "8 x tensor 4 does not divide"),
        ("olmo_hybrid", {"linear_num_key_heads": 30}, {"context": 4}, "4 does not divide"),
        ("lfm2", {"hidden_size": 36}, {"context": 8}, "8 does not divide the model's hidden_size (36)"),
        ("mamba2", {"num_heads": 4, "n_groups": 0}, {"context": 2}, "2: model.config.n_groups must be at least 1"),
        ("mamba2", {"num_heads": -4, "n_groups": 1}, {"context": 2}, "2: model.config.num_heads must be at least 1"),
        ("kimi_linear", {"linear_num_heads": 6}, {"context": 4}, "the model's linear_attn_config.num_heads (6)"),
    ],
)
def test_heads_are_divided_evenly_but_for_groups_that_ranks_share(
    family: str, heads: dict[str, int], layout: dict[str, int], told: str | None
) -> None:
    facts, parallelism = ModelFacts(model_type=family, state_heads=heads), ParallelismSpec.model_validate(layout)
    found = context_obstacle(facts, parallelism, sequence_length=4096, attention="auto")
    if told is None:
        assert found is None
    else:
        assert str(found).startswith("parallelism.context: ") and told in str(found)
        assert "a divisor or a multiple of it" in str(found) or "groups (" not in str(found)


@pytest.mark.parametrize("family", sorted(STATE_HEADS))
def test_documents_that_a_state_would_run_together_are_refused_as_in_one_process(family: str) -> None:
    for layout in ({}, {"context": 2}):
        job = tiny_job("context2", 2 if layout else 1, model=model_of(family), parallelism=layout)
        with pytest.raises(InputError, match="document_masks"):
            check_supported(job, device_type="cpu")


def test_no_kernel_of_all_at_once_is_asked() -> None:
    """It would see own tokens alone, up to the last projection."""
    model: Any = build_model(
        tiny_job("single", 1, model=model_of("bamba"), document_masks=False), vocab_size=VOCAB_SIZE
    )
    context_states.apply(model, Axis())  # type: ignore[arg-type]
    found = model.model.layers[0].mamba.forward.__wrapped__.__func__.__globals__
    assert found["mamba2_split_conv1d_scan_combined"]("projected", "weight", chunk_size=8) is None


def test_code_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version of transformers may have it that computes the convolution itself."""
    model: Any = build_model(tiny_job("single", 1, model=model_of("lfm2"), document_masks=False), vocab_size=VOCAB_SIZE)
    monkeypatch.setattr(type(model.model.layers[0].conv), "forward", lambda self, hidden: self.conv(hidden))
    with pytest.raises(
        InputError, match=r"^parallelism\.context: 2: .* computes model\.layers\.0\.conv of lfm2 in a way"
    ):
        context_states.apply(model, Axis())  # type: ignore[arg-type]


def test_every_family_of_them_is_let_in() -> None:
    assert STATE_HEADS.keys() == KINDS.keys() and KINDS.keys() <= CONTEXT_FAMILIES
