"""The search's command: whatever a job asks of its own machines, what is proposed runs, and runs as it was priced."""

import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware.prices import PriceBook
from trainyard.hardware.tables import rows
from trainyard.planner import plan, resolve, search
from trainyard.planner.moving import changed, moved_to
from trainyard.planner.reading import machines_of
from trainyard.planner.results import Option, Search
from trainyard.planner.target import length_words
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]
PEERS = {"peer_copy": True, "local_directory": "/opt/ml/local"}
SMALL = {"source": "llama-3.2-1b"}


def chosen_of(found: Search) -> Option:
    return next(item for item in found.options if item.chosen)


@pytest.mark.parametrize(
    ("sections", "where", "said"),
    [
        pytest.param({"checkpoint": PEERS}, ("p5.48xlarge", 1), "checkpoint.peer_copy=false", id="peer"),
        pytest.param(
            {"preflight": {"across_gb_per_second": 10}}, ("p5.48xlarge", 1), "across_gb_per_second=null", id="across"
        ),
        pytest.param(
            {"preflight": {"host_gb_per_second": 10}}, ("p5.4xlarge", 2), "host_gb_per_second=null", id="one GPU a host"
        ),
        pytest.param(
            {"preflight": {"host_gb_per_second": 300, "across_gb_per_second": 40}},
            ("p4d.24xlarge", 2),
            "across_gb_per_second=null",
            id="floors of another type",
        ),
        pytest.param({"preflight": {"collectives": "stop"}}, ("p5.4xlarge", 1), "collectives=auto", id="one rank"),
        pytest.param(
            {"recovery": {"elastic": {"min_instances": 3, "max_instances": 4}}, "compute": {"instance_count": 4}},
            ("p5.48xlarge", 2),
            "recovery.elastic=null",
            id="limits",
        ),
        pytest.param(
            {
                "recovery": {"elastic": {"min_instances": 1, "max_instances": 4, "batch": "adapt"}},
                "compute": {"instance_count": 2},
            },
            ("p5.48xlarge", 1),
            "training.global_batch_size=256",
            id="adapted batch",
        ),
        pytest.param(
            {"compute": {"backend": "slurm", "instance_type": "p5.48xlarge", "queue": "gpu"}},
            ("p5.48xlarge", 2),
            "compute.queue=null",
            id="partition",
        ),
        pytest.param({"compute": {"queue": "gpu"}}, ("p4d.24xlarge", 2), "compute.queue=null", id="queue"),
    ],
)
def test_what_the_chosen_machines_cannot_keep_is_in_the_command(
    job: MakeJob, sections: dict[str, Any], where: tuple[str, int], said: str
) -> None:
    spec = job(**{"model": SMALL, **sections})
    found = search(spec, instances=[where[0]], max_nodes=where[1], deadline_hours=600)
    options = [
        item for item in found.options if (item.instance_type, item.instance_count) == (f"ml.{where[0]}", where[1])
    ]
    assert len(options) == 1, "the machine is looked at"
    moved = moved_to(spec, f"ml.{where[0]}", where[1])
    assert any(item.endswith(said) for item in moved.overrides)
    assert said.partition("=")[0] in str(moved.note())
    again = changed(spec, found.overrides)
    runs, planned = resolve(again), chosen_of(found).configuration
    assert (runs.gradient_accumulation_steps, runs.steps) == (planned.gradient_accumulation_steps, found.steps)
    assert runs.learning_rate == pytest.approx(resolve(spec).learning_rate)
    time = plan(again).chosen.time
    assert time is not None and planned.time is not None
    assert time.step_seconds == pytest.approx(planned.time.step_seconds)


def test_what_the_machines_can_keep_stays(job: MakeJob) -> None:
    spec = job(
        compute={"instance_count": 4, "queue": "gpu"},
        checkpoint=PEERS,
        preflight={"host_gb_per_second": 300, "across_gb_per_second": 40},
        recovery={"elastic": {"min_instances": 2, "max_instances": 4}},
    )
    moved = moved_to(spec, "ml.p5.48xlarge", 2)
    assert moved.overrides == ("compute.instance_type=ml.p5.48xlarge", "compute.instance_count=2")
    assert moved.note() is None


@pytest.mark.parametrize(
    ("where", "dropped"),
    [
        (("p5.48xlarge", 4), set()),
        (("p5.48xlarge", 1), {"across"}),
        # Of links that are others both say nothing, though there are GPUs and hosts to measure.
        (("p4d.24xlarge", 4), {"across", "host"}),
        (("p5.4xlarge", 4), {"across", "host"}),
    ],
)
def test_a_floor_stays_with_the_links_that_it_is_of(job: MakeJob, where: tuple[str, int], dropped: set[str]) -> None:
    spec = job(compute={"instance_count": 4}, preflight={"host_gb_per_second": 300, "across_gb_per_second": 40})
    moved = moved_to(spec, f"ml.{where[0]}", where[1])
    kept = {name for name in ("host", "across") if getattr(moved.job.preflight, f"{name}_gb_per_second") is not None}
    assert kept == {"host", "across"} - dropped


def test_more_machines_than_a_training_plan_holds_are_not_bought_with_it(job: MakeJob) -> None:
    spec = job(compute={"training_plan": "my-p5-plan", "instance_count": 2}, model=SMALL)
    for count, plan_name in ((1, "my-p5-plan"), (2, "my-p5-plan"), (3, None)):
        assert moved_to(spec, "ml.p5.48xlarge", count).job.compute.training_plan == plan_name


def test_a_machine_on_which_the_job_cannot_be_is_left_out_with_its_reason(job: MakeJob) -> None:
    spec = job(training={"precision": "fp8"})
    both = search(spec, instances=["p4d.24xlarge", "p5.48xlarge"], max_nodes=1, deadline_hours=600)
    assert {item.instance_type for item in both.options} == {"ml.p5.48xlarge"}
    assert any(
        re.match(r"left out: 1 x ml\.p4d\.24xlarge: training\.precision: fp8 needs Ada", note) for note in both.notes
    )
    own = job(training={"precision": "fp8"}, compute={"instance_type": "ml.p4d.24xlarge", "instance_count": 1})
    notes = search(own, max_nodes=2, deadline_hours=600).notes
    # Its own type counts as named; of the others nobody asked.
    assert [note.partition(":")[2][:27] for note in notes if "left out: " in note] == [" 1, 2 x ml.p4d.24xlarge: tr"]
    # Nor is one without a layout left out without a word.
    odd = job(model={"source": "phi-2"}, data={"sequence_length": 2048}, training={"global_batch_size": 7})
    notes = search(odd, instances=["p4d.24xlarge", "g5.2xlarge"], max_nodes=1, deadline_hours=9999).notes
    assert "left out: 1 x ml.p4d.24xlarge: training.global_batch_size 7: no layout of up to 1 machine" in notes[0]
    with pytest.raises(InputError, match="fp8 needs Ada or Hopper"):
        search(spec, instances=["p4d.24xlarge"], max_nodes=1)


ADAPTED = {"adapter": {"kind": "lora"}}


def test_where_no_machine_has_a_layout_the_reason_is_what_keeps_the_last_of_them_out(job: MakeJob) -> None:
    both = ["p4d.24xlarge", "p5.48xlarge"]
    # Of A100s 8 bits are refused, but an H100 has them: there it is the batch.
    short = {"sequence_length": 2048}
    odd = job(model=ADAPTED, data=short, training={"precision": "fp8", "global_batch_size": 7})
    with pytest.raises(InputError, match="global_batch_size 7: divides only into layouts whose pipelines"):
        search(odd, instances=both, max_nodes=2)
    two = {"global_batch_size": 32, "micro_batch_size": 2}
    apart = job(model={"attention": "flash_attention_3"}, data={"packing": True, "document_masks": True}, training=two)
    with pytest.raises(InputError, match=r"flash_attention_3 keeps packed documents apart with .*micro_batch_size 1"):
        search(apart, instances=both, max_nodes=1)
    with pytest.raises(InputError, match=r"batch_size 7: no layout of up to 1 machine divides it$"):
        search(job(model={"source": "phi-2"}, training={"global_batch_size": 7}), instances=both, max_nodes=1)


def test_documents_kept_apart_by_flash_attention_3_are_searched_in_micro_batches_of_one(job: MakeJob) -> None:
    """Every layout was asked with sixteen sequences, and refused."""
    spec = job(model={"attention": "flash_attention_3", **ADAPTED}, data={"packing": True, "document_masks": True})
    found = search(spec, instances=["p5.48xlarge"], max_nodes=2, deadline_hours=600)
    assert chosen_of(found).configuration.micro_batch_size == 1


def book_with_plans() -> PriceBook:
    plans = [
        {"instance": name, "region": "us-east-1", "zone": "", "purchase": "training plan", "price": price,
         "source": "test", "as_of": "2025-11-01"}
        for name, price in (("p4d.24xlarge", "12"), ("p5.48xlarge", "35"))
    ]  # fmt: skip
    return PriceBook([*plans, *rows("aws_prices")], today=datetime.date(2025, 11, 20))


def test_a_training_plan_pays_for_the_machines_that_it_bought(job: MakeJob) -> None:
    spec = job(compute={"training_plan": "my-p5-plan", "instance_count": 2}, model=SMALL)
    found = search(spec, book=book_with_plans(), deadline_hours=600)
    assert {(item.instance_type, item.instance_count) for item in found.options} == {
        ("ml.p5.48xlarge", 1),
        ("ml.p5.48xlarge", 2),
    }
    assert "my-p5-plan" in chosen_of(found).price_basis and "my-p5-plan: the job holds 2 x p5" in found.notes[0]
    for asked in ({"instances": ["p5.48xlarge"]}, {"max_nodes": 2}):
        notes = search(spec, **asked, book=book_with_plans(), deadline_hours=600).notes
        assert not any("was looked at" in note for note in notes), "what is asked for is no news"
    asked = search(
        spec, instances=["p4d.24xlarge", "p5.48xlarge"], max_nodes=4, book=book_with_plans(), deadline_hours=600
    )
    paid = {(item.instance_type, item.instance_count) for item in asked.options if "my-p5-plan" in item.price_basis}
    assert paid == {("ml.p5.48xlarge", 1), ("ml.p5.48xlarge", 2)}
    assert not any("my-p5-plan" in note for note in asked.notes)
    elsewhere = moved_to(spec, "ml.p4d.24xlarge", 2)
    assert "compute.training_plan=null" in elsewhere.overrides and elsewhere.job.compute.training_plan is None


def test_every_option_is_of_what_its_command_runs(job: MakeJob) -> None:
    """Whatever is chosen by other limits: each machine's fastest layout is one that is taken."""
    spec = job(checkpoint=PEERS, preflight={"host_gb_per_second": 10}, model=SMALL)
    found = search(spec, instances=["p5.48xlarge", "p4d.24xlarge", "g5.12xlarge"], max_nodes=4, deadline_hours=600)
    assert len(found.options) > 6
    for item in found.options:
        moved = moved_to(spec, item.instance_type, item.instance_count)
        use = item.configuration
        stated = {
            "parallelism": use.parallelism,
            "training": moved.job.training.model_copy(update={"micro_batch_size": use.micro_batch_size}),
        }
        runs = resolve(moved.job.model_copy(update=stated))
        assert runs.gradient_accumulation_steps == use.gradient_accumulation_steps
        assert machines_of(moved.job).world_size == item.num_gpus


def test_the_steps_to_a_loss_are_in_words(job: MakeJob) -> None:
    spec = job(training={"steps": None, "epochs": 3})
    to_loss = spec.model_copy(update={"training": spec.training.model_copy(update={"steps": 7, "epochs": None})})
    assert changed(spec, length_words(to_loss)).training == to_loss.training
