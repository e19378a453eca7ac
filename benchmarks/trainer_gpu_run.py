"""One process of trainer_gpu.py: trains one contender for a few steps and measures it, or measures matrix products."""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import Sequences, run_trainer
from model_flops import flops_per_token
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trainer.leaving import leave
from trainer.loop import train
from trainer.models import float8
from trainer.runtime import distributed_runtime
from trainer.session import Session

from trainyard.errors import InputError
from trainyard.planner import resolve
from trainyard.planner.predict import predict
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec

LORA = {"rank": 16, "alpha": 32.0}
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING_RATE = 1e-5
Request = dict[str, Any]


class _Measured(Exception):
    """Enough steps were seen: the loop is left from inside, so that no checkpoint of 40 GB is written for nothing."""


class Stopwatch:
    """Times whole optimizer steps, from the end of the warm-up on; the device is waited for at both ends alone."""

    def __init__(self, warm_up_steps: int, measured_steps: int) -> None:
        self._warm_up, self._last = warm_up_steps, warm_up_steps + measured_steps
        self._num_steps = 0
        self._begin = self._processor_begin = 0.0
        self.seconds = self.processor_seconds = 0.0

    def __call__(self) -> None:
        """An optimizer step has ended."""
        self._num_steps += 1
        if self._num_steps == self._warm_up:
            _synchronize()
            self._begin, self._processor_begin = time.perf_counter(), time.process_time()
        elif self._num_steps == self._last:
            _synchronize()
            self.seconds = time.perf_counter() - self._begin
            self.processor_seconds = time.process_time() - self._processor_begin
            raise _Measured


def run_child(requests: list[Request], mark: str) -> None:
    """Prints each request's answer and ends the process."""
    with distributed_runtime(cpu_threads=int(os.environ["OMP_NUM_THREADS"])) as runtime:
        # Trainer would take these for a launch of many ranks.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        for request in requests:
            answer = _ceiling(request["size"]) if request["kind"] == "ceiling" else _train(request, runtime)
            print(mark + json.dumps(answer), flush=True)
    leave(0)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _ceiling(size: int) -> dict[str, Any]:
    """TFLOP/s of square matrix products, the best of five times ten: what no training can exceed here."""
    found = {}
    matrix = torch.randn(size, size, device=_device(), dtype=torch.bfloat16)
    found["bf16"] = _rate(lambda: matrix @ matrix, size)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        scale = torch.ones((), device="cuda")
        narrow = matrix.clamp(-1, 1).to(torch.float8_e4m3fn)
        found["fp8"] = _rate(
            lambda: torch._scaled_mm(narrow, narrow.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16), size
        )
    return {"tflops": found}


def _rate(product: Callable[[], torch.Tensor], size: int) -> float:
    best = float("inf")
    for _ in range(5):
        _synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            product()
        _synchronize()
        best = min(best, (time.perf_counter() - begin) / 10)
    return round(2 * size**3 / best / 1e12, 3)


def _train(request: Request, runtime: Any) -> dict[str, Any]:
    answer = {name: request[name] for name in ("case", "contender", "precision", "micro_batch_size")}
    float8.EMULATE = request["emulates_fp8"]
    folder, weights = Path(request["folder"]), Path(request["weights"])
    _write_weights(weights, request["model"])
    tokens = _write_tokens(folder, request)
    stopwatch = Stopwatch(request["warm_up_steps"], request["measured_steps"])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    body = _ours if request["contender"] == "ours" else _theirs
    output = folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    try:
        loss = body(request, runtime, tokens, output, stopwatch)
    except InputError as refusal:
        return answer | {"skipped": str(refusal)}
    except torch.cuda.OutOfMemoryError as error:
        return answer | {"failed": str(error).splitlines()[0]}
    num_tokens = request["sequence_length"] * request["micro_batch_size"] * request["num_micro_batches"]
    shape, length = request["model"], request["sequence_length"]
    return answer | {
        "num_micro_batches": request["num_micro_batches"],
        "tokens_per_second": round(num_tokens * request["measured_steps"] / stopwatch.seconds, 1),
        "processor_seconds": round(stopwatch.processor_seconds, 4),
        "flops_per_token": flops_per_token(shape, length, method=request["method"]),
        "peak_memory_gib": _peak_memory_gib(),
        "predicted_peak_memory_gib": _predicted(request),
        "loss": loss,
    }


def _peak_memory_gib() -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None


def _predicted(request: Request) -> float | None:
    """What `trainyard predict` says of the run; None where it refuses."""
    shape = request["model"]
    question = {
        "layers": shape["num_hidden_layers"],
        "hidden": shape["hidden_size"],
        "ffn": shape["intermediate_size"],
        "heads": shape["num_attention_heads"],
        "kv_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "vocab": shape["vocab_size"],
        "tied_embeddings": shape["tie_word_embeddings"],
        "gated_mlp": True,
        "seq": request["sequence_length"],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "H200",
        "gpus": 1,
        "micro_batch": request["micro_batch_size"],
        "global_batch": request["micro_batch_size"] * request["num_micro_batches"],
        "precision": request["precision"],
        "recompute": "none",
        "method": request["method"],
        **({"lora_rank": LORA["rank"]} if request["method"] == "lora" else {}),
    }
    try:
        return round(float(predict(question)["peak_memory_gib"]), 2)
    except InputError:
        return None


@torch.no_grad()
def _write_weights(folder: Path, shape: dict[str, Any]) -> None:
    """A Hugging Face directory of random bf16 weights, made on the device, block by block of at most about 4 GB."""
    if (folder / "config.json").exists():
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        names = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()}
    folder.mkdir(parents=True)
    generator = torch.Generator(_device()).manual_seed(1)
    index: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, dims in names.items():
        is_norm = len(dims) == 1
        part[name] = torch.ones(dims, dtype=torch.bfloat16) if is_norm else _normal(dims, generator)
        size += part[name].numel()
        if size > 2e9 or name == list(names)[-1]:
            file = f"model-{len(set(index.values())):05d}.safetensors"
            index |= dict.fromkeys(part, file)
            save_file(part, folder / file, metadata={"format": "pt"})
            part, size = {}, 0
    listed = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(listed, encoding="utf-8")
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    vocabulary = {f"token{number}": number for number in range(config.vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="token0")).save(str(folder / "tokenizer.json"))


def _normal(dims: Any, generator: torch.Generator) -> torch.Tensor:
    return (0.02 * torch.randn(dims, generator=generator, device=_device(), dtype=torch.bfloat16)).cpu()


def _write_tokens(folder: Path, request: Request) -> Path:
    vocabulary = request["model"]["vocab_size"]
    path = folder / f"tokens-{vocabulary}-{request['micro_batch_size']}.npy"
    if not path.exists():
        steps = request["warm_up_steps"] + request["measured_steps"] + 1
        size = steps * request["sequence_length"] * request["micro_batch_size"] * request["num_micro_batches"]
        np.save(path, np.random.default_rng(1).integers(0, vocabulary, size).astype(np.uint32))
    return path


def _ours(request: Request, runtime: Any, tokens: Path, output: Path, stopwatch: Stopwatch) -> float:
    """The whole trainer, as a job runs it, up to the last measured step. Returns that step's loss."""
    training = {
        "steps": request["warm_up_steps"] + request["measured_steps"] + 1,
        "global_batch_size": request["micro_batch_size"] * request["num_micro_batches"],
        "micro_batch_size": request["micro_batch_size"],
        "learning_rate": LEARNING_RATE,
        "schedule": {"kind": "constant"},
        "precision": request["precision"],
        "activation_checkpointing": "none",
        **({"compile": True} if request["compile"] else {}),
    }
    adapter = {"kind": "lora", **LORA, "targets": LORA_TARGETS} if request["method"] == "lora" else None
    spec = parse(
        JobSpec,
        {
            "name": "benchmark",
            "model": {"source": request["weights"], "adapter": adapter},
            "data": {
                "train": [{"path": str(tokens), "format": "tokens"}],
                "sequence_length": request["sequence_length"],
                "shuffle": False,
            },
            "training": training,
            "parallelism": {},
        },
        "job",
    )
    job = resolve(spec, world_size=1)
    output.mkdir(parents=True)
    session = Session(job, runtime, output_dir=output, scratch_dir=output / "scratch")
    step = session.strategy.optimizer_step

    def stepping(*given: Any, **options: Any) -> Any:
        update = step(*given, **options)
        stopwatch()
        return update

    session.strategy.optimizer_step = stepping  # type: ignore[method-assign]  # the one event that all loops share
    with suppress(_Measured):
        train(session)
    session.close()
    rows = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(rows[-1])["loss"])


def _theirs(request: Request, runtime: Any, tokens: Path, output: Path, stopwatch: Stopwatch) -> float | None:
    """Hugging Face's Trainer with the same weights, batches, fused AdamW, clipping and autocast, logging nothing."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    is_lora = request["method"] == "lora"
    dtype = torch.bfloat16 if is_lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(request["weights"], dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if is_lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=list(LORA_TARGETS))
        model = get_peft_model(model, settings)
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=request["micro_batch_size"],
        gradient_accumulation_steps=request["num_micro_batches"],
        max_steps=request["warm_up_steps"] + request["measured_steps"] + 1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        torch_compile=request["compile"],
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    data = Sequences(np.load(tokens, mmap_mode="r"), request["sequence_length"])
    with suppress(_Measured):
        run_trainer(model, arguments, data, stopwatch)
    return None
