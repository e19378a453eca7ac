"""Real text that every machine has: the Python standard library's source, as a data set with its own tokenizer.

    python -m trainer.data.prepare_stdlib --out DIR [--vocab-size 2048] [--seed 0] [--max-mib 6]

Writes `train.jsonl`, `validation.jsonl` (whole modules that training never sees), `tokenizer.json` (byte-level BPE
learnt on the training text) and `manifest.json`. The same Python, seed and sizes give the same bytes; a second call
finds them and does nothing.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.token_cache import open_token_cache
from trainer.data.tokenizer import JsonTokenizer
from trainyard.errors import InputError, TrainyardError
from trainyard.spec.checkpoint_names import why_not_here
from trainyard.spec.job import DataSource

END_OF_DOCUMENT = "<|endoftext|>"

_FORMAT_VERSION = 1
_NO_SOURCE_OF_ITS_OWN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
"""Folders left out: what was installed, tests (odd encodings, generated tables), lib2to3 (gone in 3.13)."""
_VALIDATION_SHARE = 0.06
_LARGEST_VALIDATION_UNIT = 0.03
"""Share of the corpus above which a module is never held back: `pydoc_data` would be most of the validation set."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: str
    """Relative to the standard library, with slashes."""
    text: str

    @property
    def unit(self) -> str:
        """The top-level module or package it belongs to: held back as a whole."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def num_bytes(self) -> int:
        """Size as UTF-8."""
        return len(self.text.encode("utf-8"))


def prepare(out: Path, *, vocab_size: int, seed: int, max_mib: float) -> dict[str, Any]:
    """Write the data set into `out` unless it is there already; the manifest's content, with `reused` added."""
    modules = corpus(Path(sysconfig.get_path("stdlib")), seed=seed, max_bytes=int(max_mib * (1 << 20)))
    key = _key(modules, vocab_size, seed)
    present = _intact_manifest(out, key)
    if present is not None:
        return present | {"reused": True}
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    held_back = validation_units(modules, seed)
    train = [module for module in modules if module.unit not in held_back]
    validation = [module for module in modules if module.unit in held_back]
    _write(out / "train.jsonl", _jsonl(train))
    _write(out / "validation.jsonl", _jsonl(validation))
    _write(out / "tokenizer.json", _train_tokenizer([module.text for module in train], vocab_size))
    manifest = {
        "version": _FORMAT_VERSION,
        "key": key,
        "seed": seed,
        "python": sys.version.split()[0],
        "validation_modules": sorted(held_back),
        "num_documents": {"train": len(train), "validation": len(validation)},
        "files": {name: _file_facts(out / name) for name in ("train.jsonl", "validation.jsonl", "tokenizer.json")},
        **_token_facts(out),
    }
    _write(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest | {"reused": False}


def corpus(stdlib: Path, *, seed: int, max_bytes: int) -> list[Module]:
    """Up to `max_bytes` of the library's modules: drawn by seed, returned in the order of their paths."""
    drawn: list[Module] = []
    left = max_bytes
    for path in sorted(_source_paths(stdlib), key=lambda path: _rank(seed, path)):
        try:
            text = (stdlib / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        module = Module(path, text)
        if text.strip() and module.num_bytes <= left:
            drawn.append(module)
            left -= module.num_bytes
    if not drawn:
        raise InputError(
            f"{stdlib}: holds no Python source of at most {max_bytes} bytes; install the full standard library"
        )
    return sorted(drawn, key=lambda module: module.path)


def validation_units(modules: Sequence[Module], seed: int) -> set[str]:
    """Top-level modules to hold back: drawn by seed until they make up the validation share of the bytes."""
    sizes: dict[str, int] = {}
    for module in modules:
        sizes[module.unit] = sizes.get(module.unit, 0) + module.num_bytes
    total = sum(sizes.values())
    held_back: set[str] = set()
    held_bytes = 0
    for unit in sorted(sizes, key=lambda unit: _rank(seed + 1, unit)):
        if held_bytes >= _VALIDATION_SHARE * total:
            break
        if sizes[unit] <= _LARGEST_VALIDATION_UNIT * total:
            held_back.add(unit)
            held_bytes += sizes[unit]
    if not held_back or len(held_back) == len(sizes):
        raise InputError(f"--max-mib: {len(sizes)} modules ({total} bytes) are too few to hold some back; allow more")
    return held_back


def _source_paths(stdlib: Path) -> Iterator[str]:
    for folder, names, files in os.walk(stdlib):
        names[:] = sorted(
            name for name in names if name not in _NO_SOURCE_OF_ITS_OWN and not name.startswith("config-")
        )
        for file in files:
            # Build-time configuration holds the paths of the machine that Python was built on.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                yield (Path(folder) / file).relative_to(stdlib).as_posix()


def _rank(seed: int, name: str) -> bytes:
    """Where `name` comes in a shuffle by `seed`: the same on every machine."""
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _key(modules: Sequence[Module], vocab_size: int, seed: int) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT_VERSION, vocab_size, seed]).encode())
    for module in modules:
        digest.update(json.dumps([module.path, module.text]).encode())
    return digest.hexdigest()


def _intact_manifest(out: Path, key: str) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        intact = manifest["key"] == key and all(
            _file_facts(out / name) == facts for name, facts in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if intact else None


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return str(tokenizer.to_str(pretty=False))


def _token_facts(out: Path) -> dict[str, Any]:
    """Sizes in tokens, the entropy to beat, and a digest of it all."""
    tokenizer = JsonTokenizer(out / "tokenizer.json")
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            split: open_token_cache(
                [DataSource(path=str(out / f"{split}.jsonl"), format="jsonl")], tokenizer, Path(folder)
            )
            for split in ("train", "validation")
        }
        return {
            "vocab_size": tokenizer.vocab_size,
            "num_tokens": {split: len(cache.tokens) for split, cache in caches.items()},
            "validation_unigram_entropy_nats": caches["validation"].unigram_entropy_nats,
            "digest": hashlib.sha256("".join(cache.digest for cache in caches.values()).encode()).hexdigest(),
        }


def _jsonl(modules: Sequence[Module]) -> str:
    return "".join(json.dumps({"path": module.path, "text": module.text}) + "\n" for module in modules)


def _file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _write(path: Path, content: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data.prepare_stdlib", description="Python's own source as a data set."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--vocab-size", type=int, default=2048, help="tokens in the tokenizer, at least 300 (default 2048)"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the modules and those held back (default 0)")
    parser.add_argument("--max-mib", type=float, default=6.0, help="MiB of source to take (default 6)")
    options = parser.parse_args(arguments)
    try:
        if options.vocab_size < 300:
            raise InputError(
                f"--vocab-size {options.vocab_size}: 256 bytes and the end token come first, so at least 300"
            )
        if (why := why_not_here(options.out)) is not None:
            raise InputError(f"--out {options.out}: {why}")
        try:
            manifest = prepare(options.out, vocab_size=options.vocab_size, seed=options.seed, max_mib=options.max_mib)
        except OSError as error:
            raise InputError(f"--out {options.out}: can't be written: {error.strerror or error}") from None
    except TrainyardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    tokens = manifest["num_tokens"]
    print(
        f"{'reused' if manifest['reused'] else 'wrote'} {options.out}: {tokens['train']} training and "
        f"{tokens['validation']} validation tokens, vocabulary {manifest['vocab_size']}, "
        f"unigram entropy {manifest['validation_unigram_entropy_nats']:.4f} nats"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
