"""Every example job is what it says: it parses, resolves and plans as it stands."""

from pathlib import Path

import pytest

from trainyard.hardware import PriceBook
from trainyard.launch.launcher import planned
from trainyard.planner import plan, resolve
from trainyard.spec.job import load_job

JOBS = sorted((Path(__file__).parents[2] / "jobs").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert {path.stem for path in JOBS} >= {
        "quickstart",
        "llama-70b",
        "llama-7b",
        "gpt-175b",
        "gpt2-1.3b",
        "llama-8b-lora",
        "resnet50-imagenet",
        "vlm-llava-7b",
    }


def test_the_tiny_job_needs_no_machine_but_this_one() -> None:
    job = load_job(next(path for path in JOBS if path.stem == "tiny"))
    resolved = resolve(job, world_size=2)
    assert (resolved.parallelism.data_replicate, resolved.num_hosts) == (2, 1)
    root = Path(__file__).parents[2]
    assert all((root / source.path).is_file() for source in (*job.data.train, *job.data.validation))


LANGUAGE = [path for path in JOBS if load_job(path).task == "causal_lm"]


@pytest.mark.parametrize("path", [path for path in JOBS if path not in LANGUAGE], ids=lambda path: path.stem)
def test_a_job_with_images_is_planned_as_it_states(path: Path) -> None:
    job = load_job(path)
    found = plan(job)
    assert resolve(job).world_size == found.num_gpus == 8
    assert found.fits is True and len(found.configurations) == 1
    told, refusals = planned(job)
    assert told["unit"] == found.unit
    assert refusals == []


def test_the_resnet_example_is_goyals_recipe() -> None:
    resolved = resolve(load_job(next(path for path in JOBS if path.stem == "resnet50-imagenet")))
    assert resolved.learning_rate == pytest.approx(0.8)
    assert resolved.gradient_accumulation_steps == 1
    config = resolved.spec.model.config
    assert config is not None
    # Five epochs of 1,281,167 images, in whole steps of 2048.
    assert resolved.spec.training.schedule.warmup_steps == pytest.approx(5 * 1_281_167 / 2048, rel=0.001)


@pytest.mark.parametrize("path", [path for path in LANGUAGE if path.stem != "tiny"], ids=lambda path: path.stem)
def test_an_example_plans_fits_and_can_be_paid(path: Path) -> None:
    job = load_job(path)
    resolved, found = resolve(job), plan(job, book=PriceBook.opened(today=None))
    assert found.num_gpus == resolved.world_size
    assert found.fits is True
    assert found.affordable is True
    assert found.cost is not None and found.cost.planned_usd is not None
    assert found.chosen.time is not None
    # The quickstart's model is far too small for its GPUs: launching kernels takes all the time. The least of the
    # others is the 70B's, a sequence at a time on eight tensor ranks.
    assert (0.0001 if path.stem == "quickstart" else 0.25) < found.chosen.time.mfu < 0.65


@pytest.mark.parametrize(
    ("name", "gpus", "billions"),
    [("llama-70b", 128, 70.6), ("gpt-175b", 512, 174.6), ("llama-7b", 8, 6.74), ("gpt2-1.3b", 8, 1.31)],
)
def test_the_named_examples_have_their_sizes(name: str, gpus: int, billions: float) -> None:
    found = plan(load_job(next(path for path in JOBS if path.stem == name)))
    assert found.num_gpus == gpus
    assert found.params / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_quickstart_is_two_hosts_of_deepspeed_zero_2() -> None:
    resolved = resolve(load_job(next(path for path in JOBS if path.stem == "quickstart")))
    assert (resolved.num_hosts, resolved.processes_per_host) == (2, 1)
    assert (resolved.parallelism.engine, resolved.parallelism.zero_stage) == ("deepspeed", 2)
    assert (resolved.steps, resolved.micro_batch_size, resolved.gradient_accumulation_steps) == (120, 4, 2)
