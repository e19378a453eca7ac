"""A resume under other code, or of another version of the job, is told; the first trainers' checkpoints are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trainer.checkpoint import CheckpointInfo, provenance
from trainer.checkpoint.provenance import told_difference
from trainer.session import Session
from trainer_testing.text_job import write_job

from trainyard.errors import InputError
from trainyard.planner.resolve import resolve
from trainyard.spec.job import load_job

OWN = {"job_sha256": "a" * 64, "code_sha256": "b" * 64}


def test_any_change_of_the_code_changes_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("trainer", "trainyard/spec"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("one = 1\n")
    monkeypatch.setattr(provenance.trainer, "__file__", str(tmp_path / "trainer" / "__init__.py"))
    monkeypatch.setattr(provenance.trainyard, "__file__", str(tmp_path / "trainyard" / "__init__.py"))
    digest = provenance.code_digest.__wrapped__
    seen = {digest()}
    assert digest() in seen
    (tmp_path / "trainyard/spec/__init__.py").write_text("one = 2\n")
    seen.add(digest())
    (tmp_path / "trainer/more.py").touch()
    seen.add(digest())
    (tmp_path / "trainer/more.py").rename(tmp_path / "trainer/less.py")
    seen.add(digest())
    assert len(seen) == 4


def test_what_differs_is_told() -> None:
    assert told_difference(OWN, OWN, step=3) is None
    assert told_difference({}, OWN, step=3) is None
    told = told_difference(OWN | {"code_sha256": "c" * 64}, OWN, step=3)
    assert told is not None
    assert told.startswith("checkpoint step=3 was written by other code (code cccccccccccc then, bbbbbbbbbbbb now)")
    both = told_difference({"job_sha256": "d" * 64, "code_sha256": "c" * 64}, OWN, step=3)
    assert both is not None and "another version of the job and other code (job dddddddddddd then" in both


def test_how_a_job_is_run_makes_no_other_version_of_it(tmp_path: Path) -> None:
    def digest(*settings: str) -> str:
        return provenance.provenance(resolve(load_job(write_job(tmp_path, "single", steps=4), settings)))["job_sha256"]

    own = digest()
    assert digest("compute.max_hours=7", "recovery.max_resumes=3", "meters.cloudwatch=true") == own
    moved = ("checkpoint.destination=/fsx/elsewhere", "checkpoint.every_steps=2", "preflight.nccl_log=true")
    assert digest(*moved) == own
    assert digest("training.seed=1234") != own


def test_a_manifest_that_no_trainer_wrote_is_refused_in_one_line() -> None:
    session: Any = object.__new__(Session)
    session._runtime = SimpleNamespace(is_first=False)
    session._checkpointer = SimpleNamespace(load=lambda *_, **__: {"step": 4, "data": {}, "rng": {}})
    with pytest.raises(InputError, match="checkpoint there: its manifest lacks engine, world_size, so"):
        session._load(cast(CheckpointInfo, SimpleNamespace(uri="there", step=4)), {})
