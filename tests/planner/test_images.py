"""Plans of jobs with images: sizes exact, memory and time by hand where a hand can, bad sizes in one line."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainyard.errors import InputError
from trainyard.hardware import PriceBook, gpu
from trainyard.planner import plan, search
from trainyard.planner.communication import EFA, Fabric
from trainyard.planner.convolutions import convolutional_memory, convolutional_step, shape_of_resnet
from trainyard.planner.elastic import smaller
from trainyard.planner.layout import Layout
from trainyard.planner.loading import IMAGES_PER_CORE_SECOND
from trainyard.planner.page import page_of
from trainyard.planner.render_search import render_search
from trainyard.planner.vision_language import shape_of_vision_language
from trainyard.spec.job import JobSpec, load_job

JOBS = Path(__file__).resolve().parents[2] / "jobs"
RESNET_18 = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
A100, LINKS = gpu("A100"), Fabric(8, 300, 50, EFA)


def resnet(*overrides: str) -> JobSpec:
    return load_job(JOBS / "resnet50-imagenet.yaml", overrides)


@pytest.mark.parametrize(
    ("config", "params", "gflops"),
    [({}, 25_557_032, 4.09), (RESNET_18, 11_689_512, 1.81)],
    ids=["ResNet-50", "ResNet-18"],
)
def test_resnets_have_their_published_sizes(config: dict[str, Any], params: int, gflops: float) -> None:
    shape = shape_of_resnet(config, image_size=224, num_classes=1000)
    assert shape.params == params
    # Papers count a multiplication and an addition as one.
    assert shape.flops_per_image / 3 / 2 / 1e9 == pytest.approx(gflops, rel=0.015)


def test_activations_are_two_tensors_a_layer() -> None:
    shape = shape_of_resnet({}, image_size=224, num_classes=1000)
    assert shape.activation_elements == pytest.approx(11.1e6, rel=0.01), "11.1 million, as the literature has it"
    one, two = (
        convolutional_memory(shape, Layout(micro_batch=size, precision="bf16", optimizer="sgd")) for size in (64, 128)
    )
    assert two.activations == 2 * one.activations == pytest.approx(128 * 2 * 2 * shape.activation_elements)
    assert one.optimizer == 4 * shape.params


def test_a_step_grows_with_the_batch_and_never_beats_the_peak() -> None:
    shape = shape_of_resnet({}, image_size=224, num_classes=1000)
    times = [
        convolutional_step(shape, Layout(micro_batch=size, precision="bf16", optimizer="sgd"), A100, LINKS).total
        for size in (32, 64, 128, 256)
    ]
    assert times == sorted(times)
    assert 256 * shape.flops_per_image / times[-1] < A100.bf16_tflops * 1e12
    slow = Layout(micro_batch=32, data_parallel=8, precision="bf16", optimizer="sgd")
    fast_links, slow_links = (
        convolutional_step(shape, slow, A100, Fabric(1, 300, rate, EFA)).total for rate in (50, 0.5)
    )
    assert slow_links > fast_links


def test_the_examples_are_planned() -> None:
    images = plan(resnet("training.epochs=null", "training.steps=56300"))
    assert images.unit == "images" and images.tokens is None and images.fits is True
    assert images.cost is not None and images.cost.usd_per_million_tokens is None
    assert images.cost.usd_per_million_samples is not None
    both = plan(load_job(JOBS / "vlm-llava-7b.yaml"))
    assert both.unit == "tokens" and both.fits is True
    assert both.params / 1e9 == pytest.approx(7.06, rel=0.01), "Vicuna-7B, CLIP ViT-L/14 and the projector"
    assert both.cost is None, "in epochs"


def test_a_step_waits_for_the_images_that_its_threads_can_not_decode() -> None:
    """Eight GPUs of 24 virtual processors each: 22 threads are enough, four are not, forty are no more than 24."""
    steps = ("training.epochs=null", "training.steps=56300")
    enough, few, many = (plan(resnet(*steps, f"images.decode_threads={count}")) for count in (22, 4, 40))
    assert enough.chosen.time and few.chosen.time and many.chosen.time
    assert enough.chosen.time.breakdown_seconds["data"] == many.chosen.time.breakdown_seconds["data"] == 0
    assert few.chosen.time.step_seconds == pytest.approx(256 / (4 * IMAGES_PER_CORE_SECOND))
    waited = few.chosen.time.step_seconds - enough.chosen.time.step_seconds
    assert few.chosen.time.breakdown_seconds["data"] == pytest.approx(waited)
    assert sum(few.chosen.time.breakdown_seconds.values()) == pytest.approx(few.chosen.time.step_seconds)
    assert few.chosen.time.mfu < enough.chosen.time.mfu and few.cost and enough.cost
    assert few.cost.expected_hours > 2 * enough.cost.expected_hours
    assert any(f"so that it waits {waited:.3g} s; raise images.decode_threads" in note for note in few.notes)
    assert any("22 threads decode" in note and "one process holds them" in note for note in enough.notes)
    assert any("24 threads decode" in note for note in many.notes)


def test_who_waits_for_processors_is_not_told_to_raise_threads() -> None:
    """ResNet-18 on p4d: its GPU takes more images than its twelve virtual processors decode."""
    small = "depths: [2, 2, 2, 2], hidden_sizes: [64, 128, 256, 512], layer_type: basic"
    steps = ("training.epochs=null", "training.steps=100", "compute.instance_type=ml.p4d.24xlarge")
    config = f"model.config={{model_type: resnet, {small}}}"
    few, all_ = (
        next(note for note in plan(resnet(*steps, config, f"images.decode_threads={count}")).notes if "data: " in note)
        for count in (4, 40)
    )
    assert few.endswith("raise images.decode_threads (a rank has 12 processors)")
    assert all_.endswith("a rank has no more processors than 12: take machines with more of them for each GPU")
    assert "12 threads decode" in all_ and "raise" not in all_


def test_images_that_few_threads_decode_in_time_are_only_counted() -> None:
    both = plan(load_job(JOBS / "vlm-llava-7b.yaml"))
    assert both.chosen.time is not None and both.chosen.time.breakdown_seconds["data"] == 0
    (note,) = [note for note in both.notes if note.startswith("data: ")]
    assert "waits" not in note and "one process" not in note
    text = plan(load_job(JOBS / "llama-7b.yaml"))
    assert text.chosen.time is not None and "data" not in text.chosen.time.breakdown_seconds
    assert not any(note.startswith("data: ") for note in text.notes)


def test_a_trained_tower_needs_more_of_everything() -> None:
    frozen, trained = (
        plan(load_job(JOBS / "vlm-llava-7b.yaml", [f"images.freeze_vision={word}"])) for word in ("true", "false")
    )
    for part in ("gradients_gib", "optimizer_gib", "activations_gib"):
        assert getattr(trained.chosen.memory, part) > getattr(frozen.chosen.memory, part)
    assert trained.chosen.memory.parameters_gib == frozen.chosen.memory.parameters_gib
    assert trained.chosen.time is not None and frozen.chosen.time is not None
    assert trained.chosen.time.step_seconds > frozen.chosen.time.step_seconds


def test_an_image_of_336_pixels_is_577_positions() -> None:
    shape = shape_of_vision_language(load_job(JOBS / "vlm-llava-7b.yaml"))
    assert shape.image_tokens == 577
    assert shape.tower_params / 1e6 == pytest.approx(303.5, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.config={model_type: vit}"], "only model_type resnet can be planned .given: vit"),
        (["model.config={model_type: resnet, depths: [3, 4]}"], "hidden_sizes has 4 stages and depths 2"),
        (["model.config={model_type: resnet, depths: [3, 4, 0, 3]}"], "must be at least 1"),
        (["model.config.hidden_sizes=256"], r"hidden_sizes: must be a list, .*given: 256"),
        (["model.config.depths={a: 3}"], "depths: must be a list"),
        (["model.config.num_labels=many"], r"num_labels: must be a whole number of at least 1 \(given: 'many'\)"),
        (["model.config.num_labels=0"], "num_labels: must be a whole number of at least 1"),
        (["model.config.id2label=5"], "id2label: must give each class's number its name"),
        (["model.config={model_type: resnet, layer_type: wide}"], "layer_type 'wide': must be basic or bottleneck"),
    ],
)
def test_what_can_not_be_planned_is_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        plan(resnet(*overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tower", "size", "words"),
    [
        ("model_type: siglip_vision_model", 8, r"patch_size 16: an image of 8 x 8 pixels holds no such patch"),
        ("model_type: clip_vision_model, hidden_size: 8, num_attention_heads: 16", 224, "16 must divide hidden_size 8"),
    ],
)
def test_towers_that_can_not_be_are_one_line(tower: str, size: int, words: str) -> None:
    config = f"model={{config: {{model_type: llava, text_config: {{model_type: llama}}, vision_config: {{{tower}}}}}}}"
    with pytest.raises(InputError, match=words):
        plan(load_job(JOBS / "vlm-llava-7b.yaml", [config, f"images.size={size}"]))


def test_what_is_counted_a_second_stands_above_it() -> None:
    job = resnet("training.epochs=null", "training.steps=1000")
    found = search(job, instances=["p5.48xlarge"], max_nodes=1, deadline_hours=600)
    others = found.model_copy(update={"alternatives": (found.options[0].configuration,)})
    console = Console(width=240, record=True, force_terminal=False)
    console.print(render_search(others))
    printed, book = console.export_text(), PriceBook.opened(today=None)
    page = page_of(job, plan(job, book=book), book=book, search=found)
    assert "images/s" in printed and "tokens/s" not in printed
    assert "Images/s of all GPUs" in page and " images/s, " in page and "okens/s" not in page


def test_the_jobs_own_classes_count_before_the_configurations() -> None:
    named = shape_of_resnet({"id2label": {0: "cat", 1: "dog", 2: "eel"}}, image_size=224)
    assert (named.classes, shape_of_resnet({"num_labels": 7}, image_size=224).classes) == (3, 7)
    assert shape_of_resnet({"num_labels": 7}, image_size=224, num_classes=5).classes == 5


def test_machines_are_searched_for_images_too() -> None:
    found = search(
        resnet("training.epochs=null", "training.steps=56300", "training.micro_batch_size=auto"), max_nodes=2
    )
    chosen = next(option for option in found.options if option.chosen)
    assert {option.instance_type for option in found.options} > {"ml.p5.48xlarge", "ml.p4d.24xlarge"}
    for option in found.options:
        layout, item = option.configuration.parallelism, option.configuration
        assert layout.data_replicate == option.num_gpus, "no formula knows what sharding a classifier saves"
        assert item.micro_batch_size * item.gradient_accumulation_steps * option.num_gpus == 2048
    priced = [option for option in found.options if option.usd is not None and option.configuration.fits]
    allowed = [option for option in priced if (option.expected_hours or 1e9) <= found.deadline_hours]
    assert chosen.usd == min(option.usd or 1e9 for option in allowed)


@pytest.mark.parametrize(("least", "counts"), [(1, [4, 2]), (2, [4, 2])])
def test_fewer_instances_must_hold_a_model_with_images(least: int, counts: list[int]) -> None:
    """Seven billion trained weights take 16 bytes each: two H100 hold them, one doesn't."""
    overrides = [
        *("compute.instance_type=ml.p5.4xlarge", "compute.instance_count=8", "training.epochs=null"),
        *("training.steps=5000", f"recovery.elastic={{min_instances: {least}, max_instances: 8}}"),
    ]
    assert [one.num_hosts for one in smaller(load_job(JOBS / "vlm-llava-7b.yaml", overrides))] == counts


def test_a_classifier_that_fewer_instances_cannot_hold_is_refused() -> None:
    elastic = [
        *("compute.instance_count=2", "recovery.elastic={min_instances: 1, max_instances: 2}"),
        *("parallelism={data_replicate: 16}", "training.global_batch_size=65536"),
    ]
    assert [one.num_hosts for one in smaller(resnet(*elastic))] == [1]
    with pytest.raises(InputError, match=r"no number of instances from 1 to 1 .* 1 x ml.p5.48xlarge have too little"):
        smaller(resnet(*elastic, "training.micro_batch_size=4096"))


def test_a_classifier_without_formulas_is_taken_at_its_word() -> None:
    elastic = ["compute.instance_count=2", "recovery.elastic={min_instances: 1, max_instances: 2}"]
    unknown = resnet("model.config={model_type: vit}", "parallelism={data_replicate: 16}", *elastic)
    assert [one.num_hosts for one in smaller(unknown)] == [1]


def test_a_searched_language_model_with_images_may_be_sharded_but_not_split() -> None:
    job = load_job(JOBS / "vlm-llava-7b.yaml", ["training.epochs=null", "training.steps=5000"])
    for option in search(job, instances=["p5.48xlarge", "p4d.24xlarge"], max_nodes=2).options:
        layout = option.configuration.parallelism
        assert layout.data_replicate * layout.data_shard == option.num_gpus
        assert option.configuration.activation_checkpointing == "none"
