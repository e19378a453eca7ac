"""The standard library as a data set: deterministic, whole modules held back, entropy as the job sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trainer.data.prepare_stdlib import main, prepare
from trainer.data.token_cache import open_token_cache
from trainer.data.tokenizer import JsonTokenizer

from trainyard.errors import InputError
from trainyard.spec.job import DataSource

FILES = ("manifest.json", "tokenizer.json", "train.jsonl", "validation.jsonl")


def test_the_same_seed_gives_the_same_bytes_and_a_second_call_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        arguments = ["--out", str(tmp_path / folder), "--vocab-size", "600", "--seed", "3", "--max-mib", "0.4"]
        # Another process: hash randomization must not matter.
        subprocess.run([sys.executable, "-m", "trainer.data.prepare_stdlib", *arguments], check=True)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    before = (tmp_path / "a/train.jsonl").stat().st_mtime_ns
    assert main(["--out", str(tmp_path / "a"), *arguments[2:]]) == 0
    assert capsys.readouterr().out.startswith("reused")
    assert (tmp_path / "a/train.jsonl").stat().st_mtime_ns == before
    (tmp_path / "a/tokenizer.json").write_text("{}")
    assert prepare(tmp_path / "a", vocab_size=600, seed=3, max_mib=0.4)["reused"] is False
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_modules_are_held_back_whole_and_the_entropy_is_the_jobs(tmp_path: Path) -> None:
    manifest = prepare(tmp_path, vocab_size=600, seed=3, max_mib=1)
    paths = {
        split: [json.loads(line)["path"] for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation")
    }
    units = {split: {path.split("/")[0].removesuffix(".py") for path in found} for split, found in paths.items()}
    assert units["train"] and units["validation"] and not units["train"] & units["validation"]
    assert not [path for path in paths["train"] if "site-packages" in path or "/test" in path]
    size = sum((tmp_path / f"{split}.jsonl").stat().st_size for split in paths)
    assert (tmp_path / "validation.jsonl").stat().st_size / size < 0.15
    validation = DataSource(path=str(tmp_path / "validation.jsonl"), format="jsonl")
    cache = open_token_cache([validation], JsonTokenizer(tmp_path / "tokenizer.json"), tmp_path / "cache")
    assert cache.unigram_entropy_nats == manifest["validation_unigram_entropy_nats"]
    assert 4.0 < cache.unigram_entropy_nats < 6.4
    assert len(cache.tokens) == manifest["num_tokens"]["validation"]
    assert cache.vocab_size == manifest["vocab_size"] == 600


def test_it_does_without_torch_which_takes_seconds_to_import(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trainer.data.prepare_stdlib import main\n"
        f"sys.exit(main(['--out', {str(tmp_path)!r}, '--vocab-size', '300', '--max-mib', '0.3']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("wrote"), done.stderr


def test_wrong_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--vocab-size", "10"]) == 2
    assert "at least 300" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file"), "--max-mib", "0.5"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    for place in ("~/set", "gs://bucket/set"):
        assert main(["--out", place]) == 2
        assert capsys.readouterr().err.startswith(f"--out {Path(place)}: ")
    with pytest.raises(InputError, match="allow more"):
        prepare(tmp_path, vocab_size=300, seed=0, max_mib=0.0003)
