"""A resume under other code, of another version of the job or in another layout is told; the first trainers'
checkpoints say nothing of either."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trainer.checkpoint import CheckpointInfo, provenance
from trainer.checkpoint.provenance import told_differences
from trainer.session import Session
from trainer_testing.text_job import write_job

from trainyard.errors import InputError
from trainyard.planner.resolve import resolve
from trainyard.spec.job import load_job

OWN = {"job_sha256": "a" * 64, "recipe_sha256": "e" * 64, "code_sha256": "b" * 64, "layout": {"hosts": 1}}


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
    assert told_differences(OWN, OWN, step=3) == []
    assert told_differences({}, OWN, step=3) == []
    assert told_differences({"job_sha256": 1, "code_sha256": [], "layout": 2}, OWN, step=3) == []
    (told,) = told_differences(OWN | {"code_sha256": "c" * 64}, OWN, step=3)
    assert told.startswith("checkpoint step=3 was written by other code (code cccccccccccc then, bbbbbbbbbbbb now)")
    others = {"job_sha256": "d" * 64, "recipe_sha256": "d" * 64, "code_sha256": "c" * 64}
    (both,) = told_differences(others, OWN, step=3)
    assert "another version of the job and other code (job dddddddddddd then" in both


def test_a_checkpoint_from_before_layouts_were_told_apart_says_that_it_may_be_that() -> None:
    (told,) = told_differences({"job_sha256": "d" * 64, "code_sha256": "b" * 64}, OWN, step=3)
    assert "by another version of the job (or another layout of it) (job dddddddddddd then" in told


def provenance_of(tmp_path: Path, *settings: str, world_size: int = 1) -> dict[str, Any]:
    job = load_job(write_job(tmp_path, "single", steps=4), settings)
    return provenance.provenance(resolve(job, world_size=world_size))


def test_how_a_job_is_run_makes_no_other_version_of_it(tmp_path: Path) -> None:
    def digest(*settings: str) -> str:
        return str(provenance_of(tmp_path, *settings)["job_sha256"])

    own = digest()
    assert digest("compute.max_hours=7", "recovery.max_resumes=3", "meters.cloudwatch=true") == own
    moved = ("checkpoint.destination=/fsx/elsewhere", "checkpoint.every_steps=2", "preflight.nccl_log=true")
    assert digest(*moved) == own
    assert digest("training.seed=1234") != own


def test_another_layout_is_told_as_what_has_changed_and_is_no_other_version(tmp_path: Path) -> None:
    then = provenance_of(tmp_path)
    now = provenance_of(tmp_path, "parallelism={data_shard: 2}", "training.micro_batch_size=1", world_size=2)
    assert then["job_sha256"] != now["job_sha256"], "as earlier trainers compare it"
    (told,) = told_differences(then, now, step=3)
    assert told.startswith("checkpoint step=3 goes on in another layout (parallelism.data_shard 1 then, 2 now; ")
    assert "processes a host 1 then, 2 now; training.micro_batch_size " in told
    seen = provenance_of(tmp_path, "training.validation_batches=3")
    assert told_differences(then, seen, step=3) == []


def test_another_version_of_the_job_in_another_layout_is_told_as_both(tmp_path: Path) -> None:
    now = provenance_of(tmp_path, "parallelism={data_shard: 2}", "training.seed=9", world_size=2)
    job, layout = told_differences(provenance_of(tmp_path), now, step=3)
    assert "was written by another version of the job (job " in job
    assert "goes on in another layout (parallelism.data_shard" in layout


MIXTURE = "model.config={model_type: mixtral, hidden_size: 32, num_hidden_layers: 1, output_router_logits: true}"


@pytest.mark.parametrize(("settings", "is_felt"), [((), False), ((MIXTURE,), True)])
def test_where_losses_hang_on_micro_batches_another_size_of_them_is_no_mere_layout(
    tmp_path: Path, settings: tuple[str, ...], *, is_felt: bool
) -> None:
    """A balance of routers is a micro-batch's (`losses/router.py`)."""
    then, now = (provenance_of(tmp_path, *settings, f"training.micro_batch_size={size}") for size in (2, 1))
    (told,) = told_differences(then, now, step=3)
    assert "goes on in another layout (training.micro_batch_size 2 then, 1 now" in told
    assert told.endswith(": its losses may go on differently, as they hang on micro-batches") == is_felt
    elsewhere = provenance_of(
        tmp_path, *settings, "parallelism={data_shard: 2}", "training.micro_batch_size=2", world_size=2
    )
    (moved,) = told_differences(
        then | {"layout": elsewhere["layout"] | {"parallelism.data_shard": 1}}, elsewhere, step=3
    )
    assert "differently" not in moved


@pytest.mark.parametrize(("batch", "is_told"), [("keep", False), ("adapt", True)])
def test_a_batch_that_follows_its_machines_is_of_the_layout(tmp_path: Path, batch: str, *, is_told: bool) -> None:
    elastic = f"recovery.elastic={{min_instances: 1, max_instances: 2, batch: {batch}}}"
    machines = ("compute.backend=slurm", "compute.instance_type=ml.p5.48xlarge", "parallelism=auto")
    base = (elastic, *machines, "training.global_batch_size=64")
    two, one = (
        provenance_of(tmp_path, *base, f"compute.instance_count={count}", world_size=8 * count) for count in (2, 1)
    )
    (told,) = told_differences(two, one, step=3)
    assert "goes on in another layout" in told
    assert ("global_batch_size 64 then, 32 now; learning_rate" in told) == is_told


def test_a_manifest_that_no_trainer_wrote_is_refused_in_one_line() -> None:
    session: Any = object.__new__(Session)
    session._runtime = SimpleNamespace(is_first=False)
    session._checkpointer = SimpleNamespace(load=lambda *_, **__: {"step": 4, "data": {}, "rng": {}})
    with pytest.raises(InputError, match="checkpoint there: its manifest lacks engine, world_size, so"):
        session._load(cast(CheckpointInfo, SimpleNamespace(uri="there", step=4)), {})
