"""Every `auto` decided alike each time, and contradictions refused in one line that says how to mend them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware import instance
from trainyard.launch.tracing import known_configuration
from trainyard.planner import resolve, search
from trainyard.planner.candidates import Rules, layouts, split_of
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.facts import check_job, facts_of
from trainyard.planner.families import config_from_source
from trainyard.planner.known_models import BESIDE_TOWERS, KNOWN_CONFIGS, STAND_INS
from trainyard.planner.memory import memory
from trainyard.planner.reading import layout_of, machines_of, model_type_of, required_shape
from trainyard.planner.resolve import fits, micro_batch_sizes
from trainyard.planner.trainer_layers import TrainerLayers
from trainyard.spec.job import JobSpec, ParallelismSpec
from trainyard.spec.model_types import LINEAR_LAYERS

MakeJob = Callable[..., JobSpec]

LOCAL = {"backend": "local", "instance_type": None, "instance_count": 1}
TINY = {"source": None, "config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}}


def test_hosts_and_ranks_come_from_the_machines(job: MakeJob) -> None:
    resolved = resolve(job())
    assert (resolved.num_hosts, resolved.processes_per_host, resolved.world_size) == (16, 8, 128)


def test_documents_kept_apart_by_flash_attention_3_come_one_sequence_at_a_time(job: MakeJob) -> None:
    """It keeps no more apart; whoever doesn't ask it to gets what fits."""
    found = {
        (attention, is_apart): resolve(
            job(
                model={"source": "llama-3.2-1b", "attention": attention},
                data={"sequence_length": 512, "packing": True, "document_masks": is_apart},
            )
        )
        for attention in ("auto", "flash_attention_3")
        for is_apart in (False, True)
    }
    sizes = {case: one.micro_batch_size for case, one in found.items()}
    assert sizes.pop(("flash_attention_3", True)) == 1
    assert set(sizes.values()) == {4} and all(one.parallelism.world_size == 128 for one in found.values())


def test_a_small_model_is_only_replicated(job: MakeJob) -> None:
    resolved = resolve(job(model={"source": "gpt2"}, data={"sequence_length": 1024}))
    assert resolved.parallelism == ParallelismSpec(data_replicate=128)
    assert resolved.activation_checkpointing == "none"
    assert (resolved.micro_batch_size, resolved.gradient_accumulation_steps) == (4, 1)


def test_a_larger_one_is_sharded_within_hosts_and_the_largest_over_all(job: MakeJob) -> None:
    assert resolve(job()).parallelism == ParallelismSpec(data_replicate=16, data_shard=8)
    assert resolve(job(model={"source": "llama-3.1-70b"})).parallelism == ParallelismSpec(data_shard=128)


def test_one_gpu_gets_recomputation_before_it_is_refused(job: MakeJob) -> None:
    one = {"instance_type": "ml.p5.4xlarge", "instance_count": 1}
    resolved = resolve(job(model={"source": "llama-3.2-3b"}, compute=one, data={"sequence_length": 8192}))
    assert resolved.parallelism.world_size == 1
    assert resolved.activation_checkpointing != "none"
    with pytest.raises(InputError, match=r"nothing fits 1 x p5.4xlarge.*needs \d+\.\d GiB of 79\.1 per GPU"):
        resolve(job(compute=one))


def test_choices_are_deterministic(job: MakeJob) -> None:
    assert resolve(job()) == resolve(job())


def test_local_ranks_are_replicas(job: MakeJob) -> None:
    resolved = resolve(job(compute=LOCAL), world_size=4)
    assert resolved.parallelism == ParallelismSpec(data_replicate=4)
    assert (resolved.num_hosts, resolved.processes_per_host) == (1, 4)
    assert (resolved.micro_batch_size, resolved.gradient_accumulation_steps) == (8, 16)


def test_a_copy_on_a_peer_needs_one(job: MakeJob) -> None:
    copied = {"checkpoint": {"local_directory": "/tmp/x", "peer_copy": True}}
    one = {"instance_type": "ml.p5.48xlarge", "instance_count": 1}
    assert resolve(job(**copied)).num_hosts == 16
    for compute in (LOCAL, one):
        with pytest.raises(InputError, match=r"checkpoint\.peer_copy: needs two hosts or more, and this job has one"):
            resolve(job(compute=compute, **copied))
    elastic = {"elastic": {"min_instances": 1, "max_instances": 2}}
    assert resolve(job(compute=one, recovery=elastic, **copied)).num_hosts == 1, "it may have a peer again"


def test_without_anything_one_process_runs_here(job: MakeJob) -> None:
    assert resolve(job(compute=LOCAL)).world_size == 1


@pytest.mark.parametrize(("batch", "ranks", "micro"), [(12, 2, 6), (14, 2, 7), (26, 2, 1), (2, 2, 1), (48, 3, 8)])
def test_micro_batch_on_an_unknown_machine_divides(job: MakeJob, batch: int, ranks: int, micro: int) -> None:
    resolved = resolve(job(compute=LOCAL, training={"global_batch_size": batch}), world_size=ranks)
    assert resolved.micro_batch_size == micro


def test_the_chosen_micro_batch_fits_and_twice_as_much_does_not(job: MakeJob) -> None:
    spec = job(compute={"instance_count": 1}, model={"source": "llama-2-7b"}, training={"global_batch_size": 1024})
    resolved, machines, shape = resolve(spec), machines_of(spec), required_shape(spec)
    for factor, expected in ((1, True), (2, False)):
        layout = layout_of(
            spec,
            resolved.parallelism,
            micro_batch=resolved.micro_batch_size * factor,
            num_micro_batches=resolved.gradient_accumulation_steps // factor,
            recompute=resolved.activation_checkpointing,
        )
        assert fits(memory(shape, layout), machines) is expected


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_capped_scores_are_written_out_and_kept(job: MakeJob, tmp_path: Path, precision: str) -> None:
    """The trainer takes no fused kernel for Gemma 2: 16 heads of 8192 x 8192 scores a layer that a GPU holds."""
    capped = KNOWN_CONFIGS["gemma-2-9b"]
    (tmp_path / "config.json").write_text(json.dumps(capped))
    here, known = {"config": None, "source": str(tmp_path)}, {"config": None, "source": "gemma-2-9b"}
    found = {}
    for name, model in {
        "folder": here,
        "known": known,
        "stated": {"source": None, "config": capped},
        "uncapped": {"source": None, "config": capped | {"attn_logit_softcapping": None}},
        "asked": {"source": None, "config": capped | {"attn_logit_softcapping": None}, "attention": "eager"},
        "fused": {"source": None, "config": capped | {"attn_logit_softcapping": None}, "attention": "sdpa"},
    }.items():
        spec = job(model=model, data={"sequence_length": 8192}, training={"precision": precision})
        layout = layout_of(
            *(spec, ParallelismSpec(data_shard=128)), micro_batch=1, num_micro_batches=4, recompute="none"
        )
        found[name] = TrainerLayers(required_shape(spec), layout).attention_bytes
    assert found["folder"] == found["known"] == found["stated"]
    element = 2 if precision == "bf16" else 4
    softmax = element + (4 if element < 4 else 0)
    assert found["asked"] == found["uncapped"], "transformers gives Gemma 2 to no kernel of torch's, capped or not"
    # Each query head has its own copy of keys and values in all of them: packed documents are a mask to sdpa.
    assert found["asked"] - found["fused"] == softmax * 16 * 8192**2
    assert found["stated"] - found["fused"] == (softmax + element) * 16 * 8192**2


@pytest.mark.parametrize("name", sorted(BESIDE_TOWERS))
def test_a_job_of_what_also_sees_is_not_planned_as_what_reads_alone(job: MakeJob, name: str) -> None:
    with pytest.raises(NotCoveredError, match=rf"model.source '{name}': .* has a vision tower"):
        required_shape(job(model={"source": name}))


@pytest.mark.parametrize("name", sorted(STAND_INS - BESIDE_TOWERS))
def test_sizes_written_as_another_familys_say_nothing_of_the_models_own(
    job: MakeJob, tmp_path: Path, name: str
) -> None:
    """phi-2's layers are q_proj and dense, whatever family its sizes are written in."""
    adapter = {"kind": "lora", "targets": ["q_proj", "fc1", "c_attn"]}
    data = {"sequence_length": 1024, "document_masks": False}
    compute = {"instance_type": "ml.p5en.48xlarge"}  # a node of the largest, of 530 billion weights, is full
    spec = job(model={"source": f"s3://acme-models/{name}", "adapter": adapter}, data=data, compute=compute)
    shape = required_shape(spec)
    assert resolve(spec).parallelism.world_size == 128 and shape.params > 1e9
    assert facts_of(spec, shape).model_type is model_type_of(spec) is None
    with pytest.raises(InputError, match=r"model.source '.*': of [a-z0-9.-]+ only the sizes are known .*config.json"):
        known_configuration(spec)
    # A folder of that name says itself what it is; of the families whose layers are known here a slip is seen.
    config = config_from_source(name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    other = adapter | {"targets": ["no_such_proj"]}
    own = job(model={"source": str(tmp_path / name), "adapter": other}, data=data, compute=compute)
    if config["model_type"] in LINEAR_LAYERS:
        with pytest.raises(InputError, match=r"model.adapter.targets: .*no linear layer"):
            resolve(own)


@pytest.mark.parametrize(
    ("name", "has", "lacks"), [("deepseek-v3", "q_a_proj", "q_proj"), ("deepseek-v2-lite", "q_proj", "q_b_proj")]
)
def test_an_adapter_of_queries_is_beside_the_kind_that_the_model_has(
    job: MakeJob, name: str, has: str, lacks: str
) -> None:
    """They come through a latent or they don't; the trainer would find no such layer once machines are rented."""

    def checked(target: str) -> None:
        spec = job(model={"source": name, "adapter": {"kind": "lora", "targets": [target, "kv_b_proj"]}})
        check_job(spec, required_shape(spec))

    checked(has)
    with pytest.raises(InputError, match=rf"model.adapter.targets: {lacks}: no linear layer.*; it has .*{has}"):
        checked(lacks)


def test_of_a_family_that_is_not_known_no_split_is_proposed(job: MakeJob) -> None:
    split = {}
    for name in ("phi-2", "pythia-1.4b"):
        spec = job(model={"source": name}, data={"sequence_length": 4096})
        shape = required_shape(spec)
        split[name] = {split_of(item) for item in layouts(spec, machines_of(spec), shape, Rules(spec, shape))}
    assert split["phi-2"] == {1} and len(split["pythia-1.4b"]) > 1


def test_micro_batch_candidates_fill_the_pipeline() -> None:
    assert list(micro_batch_sizes(32, 4, 1024)) == [8, 4, 2, 1]
    assert list(micro_batch_sizes(24, 1, 1024)) == [8, 4, 2, 1]
    assert list(micro_batch_sizes(64, 1, 65536)) == [1]


def test_tokens_become_whole_steps(job: MakeJob) -> None:
    per_step = 512 * 4096
    assert resolve(job(training={"steps": None, "tokens": 10 * per_step + 1})).steps == 11
    assert resolve(job(training={"steps": None, "tokens": 10 * per_step})).steps == 10
    assert resolve(job(training={"steps": None, "epochs": 2})).steps is None


def test_linear_scaling_of_the_learning_rate(job: MakeJob) -> None:
    assert resolve(job(training={"base_batch_size": 256})).learning_rate == pytest.approx(2e-4)
    assert resolve(job()).learning_rate == 1e-4


def test_stated_choices_stand(job: MakeJob) -> None:
    stated = {"tensor": 8, "pipeline": 4, "data_shard": 4}
    training = {"micro_batch_size": 2, "activation_checkpointing": "selective"}
    resolved = resolve(job(model={"source": "llama-3.1-70b"}, parallelism=stated, training=training))
    assert resolved.parallelism == ParallelismSpec(**stated)
    assert (resolved.micro_batch_size, resolved.gradient_accumulation_steps) == (2, 64)
    assert resolved.activation_checkpointing == "selective"


def test_a_task_without_formulas_is_replicated(job: MakeJob) -> None:
    images = {"train": [{"path": "images-{0000..0007}.tar", "format": "webdataset"}]}
    vision = job(task="image_classification", model={"source": None, "config": {"model_type": "resnet"}}, data=images)
    assert resolve(vision).parallelism == ParallelismSpec(data_replicate=128)


OPT_350M = {"hidden_size": 1024, "word_embed_proj_dim": 512, "vocab_size": 50272}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "opt", **OPT_350M}, "word_embed_proj_dim differs from hidden_size is not covered"),
        ({"model_type": "nemotron_h", "layer_types": ["full_attention", "mlp"]}, "without Mamba layers is not covered"),
        (
            {"model_type": "nemotron_h", "layer_types": ["mamba", "full_attention"]},
            "transformers writes its states out",
        ),
        (
            {"model_type": "apertus", "vocab_size": 1000},
            r"'apertus': its sizes can't be planned \(known are \d+, .*llama",
        ),
    ],
)
def test_models_that_the_formulas_dont_describe_run_in_the_stated_layout(
    job: MakeJob, config: dict[str, Any], words: str
) -> None:
    spec = job(
        model={"source": None, "config": config}, parallelism={"data_shard": 128}, data={"document_masks": False}
    )
    assert resolve(spec).parallelism.data_shard == 128
    with pytest.raises(InputError, match=words) as caught:
        required_shape(spec)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, r"config.json: model_type: is missing"),
        ({"model_type": "llamma"}, r"'llamma': its sizes can't be planned; did you mean llama\?$"),
    ],
)
def test_a_folder_of_no_known_family_is_told_so(
    job: MakeJob, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        required_shape(job(model={"source": str(tmp_path)}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "layer_types": 5}, r"model.config.layer_types: must be a list \(given: 5\)"),
        ({"model_type": "olmo2", "layer_types": "full_attention"}, "layer_types: must be a list"),
        ({"model_type": ["llama"]}, "transformers has no causal language model of this type"),
    ],
)
def test_values_of_a_wrong_kind_are_one_line(job: MakeJob, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        resolve(job(model={"source": None, "config": config}))
    assert "\n" not in str(caught.value)


def test_started_processes_decide_over_the_machines_of_the_spec(job: MakeJob) -> None:
    """A job for two hosts of one GPU, tried with two processes and in the emulator."""
    spec = job(model=TINY, compute={"instance_type": "ml.p5.4xlarge", "instance_count": 2})
    resolved = resolve(spec, world_size=2)
    assert (resolved.num_hosts, resolved.processes_per_host) == (2, 1)
    fewer = resolve(job(model=TINY), world_size=32)
    assert (fewer.num_hosts, fewer.processes_per_host) == (4, 8), "an elastic relaunch on four of sixteen hosts"
    here = resolve(job(model=TINY), world_size=2)
    assert here.world_size == 2


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"training": {"global_batch_size": 100}, "parallelism": {"data_shard": 128}},
            r"global_batch_size 100: is not divisible by the 128 data-parallel ranks; nearest allowed: 128$",
        ),
        (
            {"training": {"micro_batch_size": 3}, "parallelism": {"data_shard": 128}},
            r"not divisible by 384 \(128 data-parallel ranks x micro_batch_size 3\); nearest allowed: 384 or 768",
        ),
        (
            {"parallelism": {"tensor": 8, "data_shard": 3}},
            r"data_shard 3 x tensor 8 = 24 ranks, but 16 x ml.p5.48xlarge have 16 x 8 = 128 GPUs; make",
        ),
        (
            {"parallelism": {"tensor": 8, "data_shard": 16}, "compute": {"backend": "local"}},
            r"but 1 x ml.p5.48xlarge have 1 x 8 = 8 GPUs, as compute.backend: local is one machine, whatever"
            r" compute.instance_count \(16\) says; make the two equal .*, or say which backend has the instances$",
        ),
        (
            {"parallelism": {"tensor": 16, "data_shard": 8}},
            r"tensor 16: does not divide the model's 8 key/value heads; allowed: 1, 2, 4, 8",
        ),
        ({"parallelism": {"pipeline": 64, "data_shard": 2}}, r"pipeline 64: the model has only 32 layers"),
        ({"parallelism": {"data_shard": 128, "expert": 2}}, r"expert 2: the model has no experts"),
        (
            {"parallelism": {"pipeline": 8, "data_shard": 16}, "training": {"micro_batch_size": 16}},
            r"pipeline 8: needs at least that many micro-batches per step, there are 2",
        ),
        ({"compute": {"instance_type": "ml.g5.xlarge"}}, r"has no EFA, so a job can't span 16 .*ml.g5.12xlarge"),
        ({"compute": {"instance_type": "ml.p5.47xlarge"}}, r"unknown instance type .*ml.p5.4xlarge"),
        ({"compute": {"instance_type": "ml.trn1.32xlarge"}}, r"has Trainium, the trainer runs on NVIDIA GPUs"),
        (
            {"compute": {"instance_type": "ml.p3dn.24xlarge", "instance_count": 1}},
            r"ml.p3dn.24xlarge: has V100, for which the trainer's torch has no kernels .*; take newer GPUs",
        ),
        ({"model": {"source": None, "config": {"model_type": "llama", "num_hidden_layers": 0}}}, r"layers must be"),
    ],
)
def test_contradictions_are_refused_in_one_line(job: MakeJob, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        resolve(job(**sections))
    assert "\n" not in str(caught.value)


def test_started_processes_that_do_not_match_are_told_both_numbers(job: MakeJob) -> None:
    with pytest.raises(InputError, match=r"data_replicate 2 = 2 ranks, but 3 processes were started"):
        resolve(job(compute=LOCAL, parallelism={"data_replicate": 2}), world_size=3)


def test_the_machine_without_efa_is_fine_alone(job: MakeJob) -> None:
    assert instance("g5.2xlarge").efa_interfaces == 0
    spec = job(
        model={"source": "gpt2"},
        data={"sequence_length": 1024},
        compute={"instance_type": "ml.g5.2xlarge", "instance_count": 1},
    )
    assert resolve(spec).world_size == 1


def test_a_stated_micro_batch_that_divides_nothing_is_what_is_wrong(job: MakeJob) -> None:
    """Not the memory, of which there is enough."""
    spec = job(training={"global_batch_size": 256, "micro_batch_size": 3})
    with pytest.raises(InputError, match=r"256: is not divisible by \d+ \(.* x micro_batch_size 3\); nearest allowed"):
        resolve(spec)
    with pytest.raises(InputError, match=r"divides it into micro-batches of 3 \(training.micro_batch_size\)"):
        search(spec, instances=["p5.48xlarge"], max_nodes=2)


def test_auto_takes_no_pipeline_that_it_cannot_fill(job: MakeJob) -> None:
    compute = {"instance_type": "ml.p4d.24xlarge", "instance_count": 8}
    spec = job(model={"source": "llama-2-7b"}, training={"global_batch_size": 4}, compute=compute)
    with pytest.raises(InputError, match=r"batch_size 4: is too small for 64 ranks.*needs 8 sequences.*--search"):
        resolve(spec)
    by_two = {"global_batch_size": 8, "micro_batch_size": 2}
    twice = job(model={"source": "llama-2-7b"}, training=by_two, compute=compute)
    with pytest.raises(InputError, match=r"raise it, lower training.micro_batch_size, take fewer machines"):
        resolve(twice)
    # With as many as that it runs, and with eight by a layout that splits the model further.
    for batch in (16, 8):
        taken = resolve(job(model={"source": "llama-2-7b"}, training={"global_batch_size": batch}, compute=compute))
        assert taken.gradient_accumulation_steps >= taken.parallelism.pipeline
