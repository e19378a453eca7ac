"""Seeds of the campaign whose family the support table lacks: under data parallelism, which every family has."""

import random

from trainer_testing.families import FAMILIES, OWN_SIZES, TINY
from trainer_testing.support_table import UNTABLED
from trainer_testing.tiny import VOCAB_SIZE
from transformers import AutoConfig

from parity.draws import ONE_BY_ONE, STEPS, Drawn, draw_base, draw_training, with_layouts
from trainyard.spec.support import DOCUMENT_FAMILIES, OTHER_TENSOR_FAMILIES

SHARE = 0.15
"""Of the seeds that have no pictures."""
_OF_ROUNDINGS = frozenset({"gemma4_text", "gemma4_unified_text", "opt", "persimmon"})
"""Of which nothing is proved: tiny Gemmas 4 make a hundred times as much of a rounding in every step, and the others
have biases of keys, without a gradient but roundings."""
_TABLED = {str(model["model_type"]) for model in FAMILIES.values()} | OTHER_TENSOR_FAMILIES
OTHERS = tuple(sorted((DOCUMENT_FAMILIES | UNTABLED.keys()) - _TABLED - _OF_ROUNDINGS))
_WITHOUT_NOISE = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
"""PhiMoE's, by default."""


def is_of_others(seed: int) -> bool:
    """Whether the seed is one of these, unless it has pictures."""
    return random.Random(f"family {seed}").random() < SHARE


def model_of(family: str) -> dict[str, object]:
    """Its `model.config`: what means something to the family."""
    own = {"vocab_size": VOCAB_SIZE} | UNTABLED[family] if family in UNTABLED else TINY | OWN_SIZES.get(family, {})
    wanted = own | _WITHOUT_NOISE | {"model_type": family}
    config = AutoConfig.for_model(**wanted)
    known = config.to_dict().keys() | config.attribute_map.keys()
    return {name: value for name, value in wanted.items() if name in known}


def draw_other(seed: int) -> Drawn:
    """The seed's model, training and layouts."""
    rng = random.Random(f"other family {seed}")
    family = rng.choice(OTHERS)
    model = model_of(family)
    training = draw_training(rng, model, None)
    job = Drawn(
        *(seed, family, model, None, training),
        is_packed=family in DOCUMENT_FAMILIES and rng.random() < 0.5,
        saved_at=rng.randint(1, STEPS - 1),
        first=ONE_BY_ONE,
        second=ONE_BY_ONE,
        growth_steps=rng.choice((1, 2, None)) if training["precision"] == "fp16" else None,
        base=draw_base(rng) if rng.random() < 0.25 else None,
        attention=rng.choice(("auto", "auto", "auto", "eager")),
    )
    return with_layouts(rng, job)
