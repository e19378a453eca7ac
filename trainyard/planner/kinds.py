"""What the name of a model that isn't known says of its kind: by words alone, in names as `normal_name` writes them.

A name may be unknown for being new, so nothing but a list of families of plain decoders lets a size stand for a model;
words of other kinds are for names that stand beside stated sizes, which are mostly their users' own.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Models of which a plain decoder of the same sizes says nothing."""

    what: str
    words: re.Pattern[str]
    fields: tuple[str, ...]
    """Any of them states the kind; without one there is nothing to state."""


def _words(text: str) -> re.Pattern[str]:
    """Any of these, as words of their own; digits may stand beside them."""
    return re.compile(rf"(?<![a-z])(?:{'|'.join(text.split())})(?![a-z])")


HYBRID = Kind(
    "a hybrid",
    _words(r"""
        mamba jamba zamba bamba samba rwkv hyena striped-?hyena retnet xlstm griffin recurrent-?gemma nemotron-h
        nemotron-nano-(?:9|12)b falcon-h1 granite-4[.0-9]*-h lfm qwen[.0-9]*-(?:coder-)?next kimi-linear
        minimax-(?:text|m1) hybrid
    """),
    ("hybrid_pattern",),
)
ENCODER = Kind(
    "an encoder",
    _words(r"""
        [a-z]*bert(?:a)? electra (?:m|um|by|code|long)?t5(?:gemma)? (?:flan-)?ul2 [a-z]{0,3}bart nllb m2m madlad pegasus
        marian opus-mt aya-101
    """),
    ("encoder_layers", "head_products"),
)
SENSES = Kind(
    "a model of images or sound",
    _words(r"""
        (?:intern|mobile|eva|da)?vit [a-z]*clip siglip dino swin resnet convnext [a-z]*diffusion flux sdxl dit wan(?=\d)
        cogvideo[a-z]* cogvlm (?:video-?)?llava (?:intern|smol)?vlm? pixtral paligemma fuyu idefics blip flamingo molmo
        minicpm-[vo] [a-z]*xcomposer vision multimodal omni audio video image speech ocr asr tts whisper seamless
        musicgen janus chameleon florence kosmos glm-4(?:\.\d)?v moondream
    """),
    (),
)
KINDS = (HYBRID, ENCODER, SENSES)

EXPERTS = re.compile(
    r"moe(?![a-z])|mixtral|gpt-oss|kimi-(?:k|linear)|dbrx|grok|llama-4|minimax|hunyuan-large|mistral-large-3|"
    r"(?<![a-z])arctic(?!-embed)|deepseek-coder-v2|glm-(?:4\.[5-9]|5)|"
    r"(?<![a-z0-9])(?:\d+x\d*b?|\d+e|a\d+(?:\.\d+)?b|a\d+m)(?![a-z0-9])"
)
"""Words of names of models with experts: "moe", "8x7b", "a3b", and what such models are called."""

PLAIN = re.compile(
    r"\d+(?:\.\d+)?b$|(?:meta-|open-?|c4ai-|cerebras-|code-?|tiny-?)?(?:"
    r"llama|gemma|gpt(?:-?(?:j|neo|neox|sw3))?|opt|bloomz?|mpt|pythia|dolly|redpajama|falcon|stablelm|stable-code|"
    r"mistral|ministral|codestral|mathstral|devstral|qwen|qwq|olmo|yi|internlm|baichuan|chatglm|glm-4|glm(?=-130b)|"
    r"phi|command-[ar]|aya-(?:23|expanse)|solar|exaone|granite(?!-4)|starcoder|codegen|galactica|xgen|xglm|jais|"
    r"vicuna|alpaca|wizardlm|wizardcoder|zephyr|smollm|minicpm|eurollm|salamandra|apertus|seed-oss|persimmon|"
    r"deepseek-(?:llm|coder|math)|nemotron-4|minitron|mt-nlg|turing-nlg"
    r")(?![a-z])"
)
"""How names of plain decoders begin: families of which a size says nearly all, or a size alone."""


def other_kinds(text: str) -> list[tuple[Kind, str]]:
    """Kinds other than a plain decoder's that a name speaks of, each with the word that says so."""
    return [(kind, found[0]) for kind in KINDS if (found := kind.words.search(text))]


def is_plain(text: str) -> bool:
    """Whether a name is of a family of plain decoders, and says nothing else."""
    return PLAIN.match(text) is not None and EXPERTS.search(text) is None and not other_kinds(text)
