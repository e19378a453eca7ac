"""docs/support.md: each model family under each engine, measured against one process or refused with the reason.

`cd tests/trainer && python -m trainer_testing.support_table` runs every case at two ranks and writes the page: minutes.
"""

import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from trainer.models.build import build_model
from trainer.strategies import check_supported
from transformers import AutoConfig

from trainer_testing.families import FAMILIES, adapter
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job
from trainyard.errors import InputError
from trainyard.spec.support import (
    CONTEXT_FAMILIES,
    EXPERT_FAMILIES,
    EXPERT_TENSOR_FAMILIES,
    OTHER_TENSOR_FAMILIES,
    PIPELINE_FAMILIES,
    ROUTER_FAMILIES,
    STAGE_FAMILIES,
    STATE_HEADS,
    TENSOR_FAMILIES,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "support.md"
ENGINES = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "tensor2": "tensor",
    "pipeline2": "pipeline",
    "context2": "context",
    "expert2-fsdp2": "expert, FSDP2",
}
"""Strategy name -> the table's column."""
PRODUCTS: dict[str, dict[str, int]] = {
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
    "context2": {"context": 2},
    "expert2-fsdp2": {"data_shard": 2, "expert": 2},
}
"""Strategy name -> the job's parallelism section, for those that `tiny.LAYOUTS` leaves out."""
_OTHERS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0},
}
UNTABLED: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},
    "falcon": _OTHERS,
    "gpt_oss": _OTHERS | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "mamba": _OTHERS | {"state_size": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "opt": _OTHERS | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi3": _OTHERS | {"num_key_value_heads": 2, "pad_token_id": 0},
    "qwen3_5_text": _OTHERS | {"num_key_value_heads": 2, "head_dim": 8} | _DELTA,
    "qwen3_next": _OTHERS
    | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    | _DELTA,
    "stablelm": _OTHERS | {"num_key_value_heads": 2},
}
"""Model types that no table names: older ones, one of state spaces, two of delta rules, two of experts."""
METHODS = ("full", "lora", "qlora")
FP8 = (
    "## fp8",
    "",
    "`training.precision: fp8` beside the families above, but for GPT-2, which has no layers to convert. What runs is",
    "held against one process in fp8, emulated on CPU, by `tests/trainer/test_fp8.py` (Llama; Mixtral for expert).",
)
"""Its part of the page, above its table."""
STEPS = 4
WORLD_SIZE = 2
TOLERANCE = 1e-5


class Case(NamedTuple):
    """One cell of the table."""

    family: str
    method: str
    engine: str


CASES = [Case(family, method, engine) for method in METHODS for family in FAMILIES for engine in ENGINES]


def request(case: Case, strategy: str, sources: Path) -> RunRequest:
    """The case's run under `strategy`: its own engine, or one process. `sources`: base models, by `source_of`."""
    if case.method == "full":
        job: dict[str, Any] = {"model": FAMILIES[case.family]}
    else:
        job = {"source": str(source_of(sources, case.family)), "adapter": adapter(case.family, case.method)}
    if strategy in PRODUCTS:
        job["parallelism"] = PRODUCTS[strategy]
    return RunRequest(strategy=strategy, last_step=STEPS, job=job)


def source_of(sources: Path, family: str) -> Path:
    """Where the family's base model lies."""
    return sources / family.replace(", ", "-")


def save_sources(sources: Path, families: Iterable[str]) -> None:
    """Writes a base model of random weights for each family."""
    for family in families:
        model = build_model(tiny_job("single", 1, model=FAMILIES[family]), vocab_size=VOCAB_SIZE)
        model.save_pretrained(source_of(sources, family))


def save_configurations(sources: Path) -> None:
    """Writes each family's configuration where its base model would lie: all that a refusal looks at."""
    for family, settings in FAMILIES.items():
        stated = dict(settings)
        AutoConfig.for_model(stated.pop("model_type"), **stated).save_pretrained(source_of(sources, family))


def refusal(case: Case, sources: Path) -> str | None:
    """Why the trainer refuses the case before anything is read; None when it runs it."""
    job = tiny_job(case.engine, WORLD_SIZE, **request(case, case.engine, sources).job)
    try:
        check_supported(job, device_type="cpu")
    except InputError as error:
        return str(error).replace(str(source_of(sources, case.family)), "SOURCE")
    return None


def measure(cases: Sequence[Case]) -> dict[Case, float]:
    """The worst relative error over losses, gradient norms and validation loss, two ranks against one process."""
    models = list({(case.family, case.method): case for case in cases}.values())
    if not models:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        save_sources(sources, {case.family for case in models if case.method != "full"})
        references = run(1, [request(case, "single", sources) for case in models], timeout_seconds=900)
        results = run(WORLD_SIZE, [request(case, case.engine, sources) for case in cases], timeout_seconds=900)
    by_model = {(case.family, case.method): result for case, result in zip(models, references, strict=True)}
    return {
        case: worst_relative_error(result, by_model[case.family, case.method])
        for case, result in zip(cases, results, strict=True)
    }


def fp8_refusal(method: str, engine: str) -> str | None:
    """Why a job in fp8 is refused where it is read, whatever its model; None where it isn't."""
    if method == "full":
        job: dict[str, Any] = {"model": FAMILIES["Mixtral"]}
    else:
        job = {"source": "model", "adapter": adapter("Mixtral", method)}
    try:
        tiny_job(engine, WORLD_SIZE, parallelism=PRODUCTS.get(engine), precision="fp8", **job)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return None


def page(errors: dict[Case, float], refusals: dict[Case, str]) -> str:
    """The page's text; every case has to be in one of the two."""
    narrow = {(method, engine): fp8_refusal(method, engine) for method in METHODS for engine in ENGINES}
    texts = [reason_of(case, text) for case, text in refusals.items()]
    reasons = list(dict.fromkeys([*texts, *(text for text in narrow.values() if text)]))

    def cell(case: Case) -> str:
        if case in refusals:
            return f"refused ({reasons.index(reason_of(case, refusals[case])) + 1})"
        return f"{errors[case]:.0e}"

    both = PIPELINE_FAMILIES - STAGE_FAMILIES
    lines = [
        "# Models and engines",
        "",
        "Each number is measured: the worst relative difference from the same job in one process, over losses,",
        f"gradient norms and the validation loss of {STEPS} optimizer steps in float32 with accumulation, clipping and",
        f"unequal sequences, of a tiny model of the family on {WORLD_SIZE} CPU ranks. At most {TOLERANCE:.0e} is",
        "allowed. What can't be done is refused by `plan` and `launch`, and by the trainer before anything is read,",
        "for the reason that the number in brackets names.",
        "",
        "full: all weights, from a configuration. lora, qlora: adapters of the attention, on a base model read from",
        "files; 4-bit weights are the same numbers under every engine, so qlora is held to the same tolerance.",
        "",
        "Products of these, at up to 8 ranks and in float64, are in the table of `tests/trainer/parity`.",
        "",
        "`tensor` also takes, each tried at 2 ranks alone (`pytest -m full tests/trainer/test_more_families.py`) and",
        f"none proposed by the planner: {', '.join(sorted(OTHER_TENSOR_FAMILIES))}.",
        "",
        "`expert` also takes, each held against one process in float64 at 2 ranks, from a configuration and from",
        "files, these also with adapters, lora and qlora (`pytest -m full tests/trainer/test_expert_families.py`):",
        f"{', '.join(sorted(EXPERT_FAMILIES - TENSOR_FAMILIES))}.",
        "",
        "Of these `tensor` takes, alone or beside `expert`, and the planner proposes none:",
        f"{', '.join(sorted(EXPERT_TENSOR_FAMILIES))}.",
        "",
        "The routers' auxiliary loss is transformers' own (`pytest tests/trainer/test_loss_router.py`) of:",
        f"{', '.join(sorted(ROUTER_FAMILIES))}.",
        "",
        "`pipeline` also takes, each held against one process in float64 at 2 ranks (`pytest -m full",
        f"tests/trainer/test_cut_families.py`): {', '.join(sorted(both - TENSOR_FAMILIES))}.",
        f"So does `context`, but for {', '.join(sorted(both - CONTEXT_FAMILIES))}.",
        "",
        "`pipeline` takes as well, held likewise, those whose layers carry a state along the sequence, choose",
        f"tokens or are of other new kinds: {', '.join(sorted(STAGE_FAMILIES))}.",
        "Of these `context` takes those with delta rules, state spaces of Mamba-2's kind or short convolutions,",
        f"where it divides the heads of these layers: {', '.join(sorted(STATE_HEADS))}.",
        "Settings by which layers need more of each other than hidden states are refused (Gemma 4's shared keys and",
        "values and its inputs of each layer, shared indexers of glm_moe_dsa and hy_v4).",
        "",
        "Of these families' products `expert` with FSDP2 is held so and, of the mixtures that `tensor` takes, with",
        "both. Others, adapters in them, and other schedules than 1f1b are held with ten",
        "families at most: the code is that of the tables'.",
        "",
        "DDP, FSDP2 and ZeRO don't ask for a model type of the tables; where a type's packed documents can't be kept",
        "apart, `data.document_masks: false` is asked for. Of those that the tables lack these are held against one",
        f"process (`pytest -m full tests/trainer/test_more_families.py`): {', '.join(sorted(UNTABLED))}.",
        "",
        "Written by `python -m trainer_testing.support_table` in `tests/trainer`; a test holds that the trainer",
        "refuses what the page says, no more and no less.",
    ]
    for method in METHODS:
        lines += ["", f"## {method}", "", f"| family | {' | '.join(ENGINES.values())} |"]
        lines.append("|---" * (1 + len(ENGINES)) + "|")
        lines += rows({family: [cell(Case(family, method, engine)) for engine in ENGINES] for family in FAMILIES})
    lines += ["", *FP8, "", f"| method | {' | '.join(ENGINES.values())} |", "|---" * (1 + len(ENGINES)) + "|"]
    for method in METHODS:
        given = [narrow[method, engine] for engine in ENGINES]
        told = [f"refused ({reasons.index(reason) + 1})" if reason else "runs" for reason in given]
        lines.append(f"| {method} | {' | '.join(told)} |")
    if reasons:
        lines += ["", "## Refusals", "", *(f"{number}. `{reason}`" for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def reason_of(case: Case, refusal: str) -> str:
    """A refusal without the name of the model, which is the row's."""
    model_type = str(FAMILIES[case.family]["model_type"])
    return re.sub(rf"(model_type|plan for|plan of|2:) {model_type}\b", r"\1 ...", refusal)


def rows(cells: dict[str, list[str]]) -> list[str]:
    """A line a family; families that are refused everywhere for the same reasons share one."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for family, values in cells.items():
        is_refused = all(value.startswith("refused") for value in values)
        lines.setdefault((*values, "" if is_refused else family), []).append(family)
    names = {
        key: "every family" if len(families) == len(cells) else "; ".join(families) for key, families in lines.items()
    }
    return [f"| {names[key]} | {' | '.join(key[:-1])} |" for key in lines]


def cells_of(text: str) -> dict[Case, str]:
    """The cells of a page, as `page` writes it."""
    cells: dict[Case, str] = {}
    method = ""
    for line in text.splitlines():
        if line.startswith("## "):
            method = line.removeprefix("## ")
        elif method in METHODS and line.startswith("| ") and not line.startswith("| family"):
            name, *values = (value.strip() for value in line.strip("|").split("|"))
            for family in FAMILIES if name == "every family" else name.split("; "):
                cells |= {Case(family, method, engine): value for engine, value in zip(ENGINES, values, strict=True)}
    return cells


def refusals_of(cases: Iterable[Case]) -> dict[Case, str]:
    """The refused cases, each with its line."""
    with tempfile.TemporaryDirectory() as folder:
        save_configurations(Path(folder))
        return {case: reason for case in cases if (reason := refusal(case, Path(folder))) is not None}


def main() -> int:
    """Measures everything and writes the page; 1 when a case is out of tolerance."""
    refusals = refusals_of(CASES)
    errors: dict[Case, float] = {}
    for method in METHODS:
        for family in FAMILIES:
            cases = [case for case in CASES if (case.family, case.method) == (family, method)]
            errors |= measure([case for case in cases if case not in refusals])
    PAGE.write_text(page(errors, refusals), encoding="utf-8")
    wrong = {case: error for case, error in errors.items() if not error <= TOLERANCE}
    for case, error in wrong.items():
        print(f"{case}: {error:.1e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
