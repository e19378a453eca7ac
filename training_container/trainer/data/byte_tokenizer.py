"""The trainer's reading of text as bytes, as a tokenizer's files: who gets the model reads texts as it did."""

import json
from pathlib import Path

END_TOKEN = "<|endoftext|>"
"""Its id is ByteTokenizer's end of a document."""


def write_byte_tokenizer(folder: Path) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json, whose ids are ByteTokenizer's; their names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte for byte, letter in enumerate(_letters())} | {END_TOKEN: 256}
    # Byte-level BPE without a merge. The end is no added token: its letters in a text are read as bytes here too.
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be seen, else one from 256
    on (GPT-2's encoder.py, bytes_to_unicode)."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
