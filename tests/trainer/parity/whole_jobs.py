"""A seed of the parity campaign as a whole job: the trainer's own command on files of a random kind, ended midway.

`draws` has the model, the optimizer and two layouts; here come data of one or two formats (`files`), packing, a
tokenizer, validation sets, when to save and what to keep, perhaps data and checkpoints in S3, a batch whose loss is no
number or a spike and what is done about it, and how the first layout's run ends: one rank is told to stop, all are
killed, or the job stops itself because of a batch. The second layout goes on in the same folder, and may be told to
stop, too: then the first one ends what it began. One process that nobody disturbs is what all must equal: every step
once, exactly its tokens, its losses, norms, rates and validations within tolerance, and the model that is exported in
the end.

Of a job that isn't compared with one process the first layout goes on, and it must equal itself, undisturbed, to the
last bit.
"""

import json
import math
import random
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from trainer.export import Export, export
from trainer_testing.bucket import BUCKET, bucket_here, upload
from trainer_testing.distributed import finish
from trainer_testing.faulty_trainer import SEEN_BEFORE_SPIKES
from trainer_testing.text_job import rows_of, start_faulty_trainer, start_trainer
from trainer_testing.tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForImageTextToText

from parity import files
from parity.draws import Drawn, Layout

STEPS_OF_WHOLE = 10
_SECONDS = 300
_STOPPED = 75
"""The exit code of whoever wants to be resumed."""
SPIKE = 1000.0
"""Times the loss of a batch that goes wrong without being no number."""
_SPIKE_FACTOR = 10.0
"""What the job calls a spike: few gradients of a tiny model leap so far by themselves."""
_EXIT_CODES = {"terminate": {_STOPPED}, "kill": {-signal.SIGKILL, 1}, "stop": {1}}
_READERS: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "image_classification": AutoModelForImageClassification,
    "vision_language": AutoModelForImageTextToText,
}
_WITHOUT_GRADIENT = re.compile(r"\.key\.bias$|vision_\S*\.k_proj\.bias$")
"""Of ViT, CLIP and SigLIP: what is added to all keys alike shifts each query's scores alike, which softmax doesn't see,
so that it is made of roundings (1e-11). Language models turn their keys by their positions."""
_COMPARED = ("loss", "grad_norm", "learning_rate", "validation_loss", "validation_top1_accuracy", "skipped")


@dataclass(frozen=True)
class WholeJob:
    """What a seed adds to `Drawn`."""

    drawn: Drawn
    content: dict[str, Any]
    """The job file, but for its layout."""
    end: str
    """terminate: one rank is told to stop; kill: all die at once; stop: its own loss is no number, or a spike."""
    end_step: int
    end_ranks: tuple[int, ...]
    exported: dict[str, bool]
    """How the model is exported: its running average, an adapter merged."""
    poisoned: int | None = None
    """The batch, counted from 0, that goes wrong in every run."""
    is_spike: bool = False
    """What goes wrong is a spike, on all ranks alike, or a loss that is no number, on one."""
    stops_again: int | None = None
    """The step at which the second start is told to stop, and a third goes on."""
    is_streamed: bool = False
    """Data are read from S3."""
    is_saved_there: bool = False
    """Checkpoints go to S3."""

    @property
    def words(self) -> str:
        """How it is disturbed."""
        what = "a spike" if self.is_spike else "no number"
        found = [f"{self.end}{f', {what},' if self.end == 'stop' else ''} at step {self.end_step}"]
        found += [] if self.stops_again is None else [f"told to stop again at step {self.stops_again}"]
        found += [] if self.poisoned is None else [f"batch {self.poisoned} is {what}"]
        found += ["streamed"] * self.is_streamed + ["saved to S3"] * self.is_saved_there
        return ", ".join(found)

    def poison(self, layout: Layout, batch: int | None) -> list[dict[str, Any]]:
        """What makes a batch go wrong: of a pipeline's ranks not all have a loss, and of a tensor group one tells it,
        without whom fp16 would take the others' gradients for an overflow."""
        if batch is None:
            return []
        world_size = layout.spec.world_size
        is_everywhere = self.is_spike or layout.spec.pipeline > 1
        one = self.drawn.seed % world_size
        ranks = range(world_size) if is_everywhere else [one - one % layout.spec.tensor]
        fault = {"kind": "poison", "step": 0, "first_sequence": batch * self.drawn.training["global_batch_size"]}
        return [{"rank": rank} | fault | ({"factor": SPIKE} if self.is_spike else {}) for rank in ranks]

    def ends(self, layout: Layout) -> list[dict[str, Any]]:
        """What happens to the first layout's run."""
        if self.end == "stop":
            return self.poison(layout, self.end_step - 1)
        return [{"rank": rank, "kind": self.end, "step": self.end_step} for rank in self.end_ranks]

    def starts(self) -> list[tuple[Layout, str | None, list[dict[str, Any]]]]:
        """Each start's layout, how it ends, and by what; the last one comes to its end."""
        first = self.drawn.first
        second = self.drawn.second if self.drawn.is_exact else first
        found: list[tuple[Layout, str | None, list[dict[str, Any]]]] = [(first, self.end, self.ends(first))]
        if self.stops_again is not None:
            again = {"rank": second.spec.world_size - 1, "kind": "terminate", "step": self.stops_again}
            found += [(second, "terminate", [again]), (first, None, [])]
        else:
            found.append((second, None, []))
        return found

    def place(self, folder: Path, output: str) -> str:
        """Where a run's checkpoints are."""
        if self.is_saved_there:
            return f"s3://{BUCKET}/{self.drawn.seed}/{output}"
        return str(folder / (f"{output}-destination" if "destination" in self.content["checkpoint"] else output))

    def file(self, folder: Path, name: str, layout: Layout, *, output: str) -> Path:
        """The job under a layout, written; what it keeps outside `output` lies in folders of that run's own."""
        training = self.content["training"] | {
            "micro_batch_size": layout.micro_batch_size,
            "activation_checkpointing": layout.recompute,
            "loss": layout.loss,
        }
        path = folder / name
        own = {"destination": self.place(folder, output)} if "destination" in self.content["checkpoint"] else {}
        if "local_directory" in self.content["checkpoint"]:
            own["local_directory"] = str(folder / f"{output}-local_directory")
        changes = {"training": training, "parallelism": layout.parallelism}
        changes["checkpoint"] = self.content["checkpoint"] | own
        path.write_text(json.dumps(self.content | changes))
        return path


def whole_job(drawn: Drawn, folder: Path, source: Path) -> WholeJob:
    """The seed's, with its files in `folder`; `source`: the base model, if it begins with one."""
    rng = random.Random(f"whole job {drawn.seed}")
    has_tokenizer = rng.random() < 0.4
    data = _data(rng, drawn, folder, has_tokenizer=has_tokenizer)
    model: dict[str, Any] = {"source": str(source), "adapter": drawn.adapter}
    if drawn.base is None:  # else of the base's own size
        sizes = (VOCAB_SIZE, VOCAB_SIZE + 1) if has_tokenizer else (257, 264, 300)
        model = {"config": drawn.model | {"vocab_size": rng.choice(sizes)}}
    training = {name: value for name, value in drawn.training.items() if name != "sequence_length"}
    training |= {"validation_every_steps": rng.choice((None, 2)), "validation_batches": 1} | _course(rng, drawn, data)
    content: dict[str, Any] = {
        **{"name": "whole", "model": model | {"attention": drawn.attention}, "data": data},
        **{"training": training, "checkpoint": draw_saves(rng, validates=bool(data["validation"]))},
    }
    end = draw_end(rng, content)
    average = drawn.training["optimizer"].get("average_decay") is not None and rng.random() < 0.5
    job = WholeJob(
        drawn,
        content,
        **draw_where_it_ends(rng, end, content, drawn.first),
        exported={"average": average, "merge": drawn.adapter is not None and rng.random() < 0.5},
        poisoned=rng.randint(1, STEPS_OF_WHOLE - 2) if training.get("on_anomaly") is not None else None,
    )
    return _further(random.Random(f"further of whole job {drawn.seed}"), job)


def _further(rng: random.Random, job: WholeJob) -> WholeJob:
    """Drawn last, by numbers of its own: what a seed stands for beside stays what it was before there was any."""
    content = json.loads(json.dumps(job.content))
    training, saves = content["training"], content["checkpoint"]
    end, poisoned = job.end, job.poisoned
    is_spike = rng.random() < 0.5 and job.drawn.precision != "fp16"  # whose loss scale takes it for an overflow
    if poisoned is None and rng.random() < 0.3:
        end, saves["asynchronous"] = "stop", False
    if is_spike and (poisoned is not None or end == "stop"):
        training["spike_factor"] = _SPIKE_FACTOR
    if is_spike and poisoned is not None:
        poisoned = rng.randint(SEEN_BEFORE_SPIKES, STEPS_OF_WHOLE - 2)
    if training.get("schedule", {}).get("kind") == "wsd":
        training["schedule"]["decay_fraction"] = rng.choice((0.2, 0.5, 1.0))
    end_step = max(job.end_step, SEEN_BEFORE_SPIKES + 1) if end == "stop" and is_spike else job.end_step
    has_time = end_step < STEPS_OF_WHOLE - 2
    stops_again = rng.randint(end_step + 1, STEPS_OF_WHOLE - 2) if has_time and rng.random() < 0.4 else None
    is_streamed = rng.random() < 0.3
    if is_streamed:
        content["data"]["streaming"] = True
    is_saved_there = is_streamed and rng.random() < 0.5
    if is_saved_there:
        saves["destination"] = "its own"
    changes: dict[str, Any] = {"content": content, "end": end, "end_step": end_step, "poisoned": poisoned}
    changes |= {"is_spike": is_spike, "stops_again": stops_again}
    return replace(job, **changes, is_streamed=is_streamed, is_saved_there=is_saved_there)


def _data(rng: random.Random, drawn: Drawn, folder: Path, *, has_tokenizer: bool) -> dict[str, Any]:
    is_packed = rng.random() < 0.7
    data: dict[str, Any] = {
        "sequence_length": drawn.training["sequence_length"],
        "packing": is_packed,
        "document_masks": drawn.is_packed and is_packed,
        "shuffle": rng.random() < 0.8,
    }
    is_ready_made = rng.random() < 0.2 or (drawn.base is not None and not has_tokenizer)
    kinds = [files.tokens] * rng.randint(1, 2) if is_ready_made else rng.sample(files.MAKERS, 2)
    bad, count = rng.choice((0, 0, 2)), rng.choice((24, 80))
    made = [make(rng, folder / f"train-{number}", 0 if number else bad, count) for number, make in enumerate(kinds)]
    data["train"] = [source for source, _ in made]
    data["validation"] = []
    for number in range(rng.randint(0, 2)):
        source, _ = kinds[0](rng, folder / f"validation-{number}", 0, 80)
        data["validation"].append(source | ({"name": "more", "every_steps": 3, "batches": 1} if number else {}))
    if found := sum(count for _, count in made):
        data["max_bad_records"] = found
    if has_tokenizer:
        files.write_tokenizer(rng, folder / "tokenizer")
        data["tokenizer"] = str(folder / "tokenizer")
    elif files.chats in kinds:
        (folder / "chat.jinja").write_text(rng.choice((files.CHAT, files.MARKED_CHAT)))
        data["chat_template"] = str(folder / "chat.jinja")
    if rng.random() < 0.2:
        data["shared_tokens"] = True
    return data


def _course(rng: random.Random, drawn: Drawn, data: dict[str, Any]) -> dict[str, Any]:
    """How long, and what is looked at on the way: of what changes no number, or both layouts' alike."""
    batch, length = drawn.training["global_batch_size"], drawn.training["sequence_length"]
    found: dict[str, Any] = {"steps": STEPS_OF_WHOLE}
    if rng.random() < 0.25:
        found = {"tokens": STEPS_OF_WHOLE * batch * length - rng.randrange(length)}
    if data["packing"] and {source["format"] for source in data["train"]} == {"tokens"} and rng.random() < 0.5:
        sequences = sum(map(files.num_ids, data["train"])) / length
        found = {"epochs": round((STEPS_OF_WHOLE + 0.5) * batch / sequences, 3)}
    if rng.random() < 0.2:
        found["base_batch_size"] = 2 * batch
    if rng.random() < 0.3:
        is_torch = {drawn.first.spec.engine, drawn.second.spec.engine} == {"torch"}
        found["on_anomaly"] = rng.choice(("rollback", "skip")) if is_torch else "rollback"
    if rng.random() < 0.3:
        found["deterministic"] = True
    return found | {"observe_every_steps": rng.choice((50, 2)), "phase_ranges": rng.random() < 0.2}


def draw_end(rng: random.Random, content: dict[str, Any]) -> str:
    """How the first run ends; one that is killed waits for its saves."""
    end = rng.choice(("terminate", "kill"))
    if end == "kill":
        content["checkpoint"]["asynchronous"] = False  # else nothing may be committed yet, and nothing gone on with
    return end


def draw_where_it_ends(rng: random.Random, end: str, content: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """WholeJob's fields: after the first save, on one rank that hears of it, or on all."""
    ranks = tuple(range(layout.spec.world_size))
    step = rng.randint(1 + content["checkpoint"]["every_steps"], STEPS_OF_WHOLE - 2)
    return {"end": end, "end_step": step, "end_ranks": ranks if end == "kill" else (rng.choice(ranks),)}


def draw_saves(rng: random.Random, *, validates: bool) -> dict[str, Any]:
    """When a whole job saves, where, and what it keeps."""
    found: dict[str, Any] = {
        "every_steps": rng.choice((1, 1, 2, 3)),
        "keep_last": rng.choice((1, 2)),
        "asynchronous": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        found["keep_every_steps"] = 2
    if rng.random() < 0.3:
        found["keep_best"] = {"metric": rng.choice(("loss", "validation_loss")) if validates else "loss"}
    if rng.random() < 0.3:
        found["local_directory"] = "its own"
    if rng.random() < 0.3:
        found["destination"] = "its own"
    return found


def run_whole(job: WholeJob, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Worst relative differences of a figure from one process: of one in other parts (`own`), of the disturbed job
    (`job`, `export`); and what did not hold. AssertionError where a run fails."""
    with data_in_place(job, folder) as placed:
        return _compared(placed, folder)


@contextmanager
def data_in_place(job: WholeJob, folder: Path) -> Iterator[WholeJob]:
    """The job, while its data are where it reads them. Ready-made tokens are streamed alone, or not at all."""
    if not job.is_streamed:
        yield job
        return
    content = json.loads(json.dumps(job.content))
    are_tokens = [source["format"] == "tokens" for source in content["data"]["train"]]
    with bucket_here() as client:
        for part in ("train", "validation"):
            for number, source in enumerate(content["data"][part]):
                if source["format"] != "tokens" or all(are_tokens):
                    prefix = f"{job.drawn.seed}/{part}-{number}"  # a bucket lasts as long as this process
                    source["path"] = upload(client, Path(source["path"]), prefix)
        yield replace(job, content=content)


def _compared(job: WholeJob, folder: Path) -> tuple[dict[str, float], list[str]]:
    drawn = job.drawn
    wanted = _run(job, folder, drawn.whole_batch, "alone")
    again = _run(job, folder, drawn.parts if drawn.is_exact else drawn.first, "again")
    starts = job.starts()
    for layout, end, faults in starts:
        rows = _run(job, folder, layout, "out", end, faults)
    problems = odds(rows, wanted)
    if not was_gone_on_with(rows, len(starts)):
        problems.append(f"whole job: begun anew, or done at once: attempts {[row['attempt'] for row in rows]}")
    exports = [exported(job, folder, name) for name in ("alone" if drawn.is_exact else "again", "out")]
    if exports[0].keys() != exports[1].keys():
        problems.append(f"whole job: it exports {sorted(exports[1])}, undisturbed {sorted(exports[0])}")
    export = worst_tensor(*exports)
    if not drawn.is_exact:
        return {}, problems + other_bits(rows, again, export)
    return {"own": worst_difference(again, wanted), "job": worst_difference(rows, wanted), "export": export}, problems


def other_bits(rows: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]], export: float) -> list[str]:
    """What is not exactly so of a job that was resumed under its own layout as of one that wasn't ended."""
    error = worst_difference(rows, undisturbed)
    found = [] if error == 0 else [f"whole job: resumed at its own layout, figures are {error:.1e} off"]
    return found + ([] if export == 0 else [f"whole job: resumed at its own layout, its export is {export:.1e} off"])


def _run(
    job: WholeJob,
    folder: Path,
    layout: Layout,
    output: str,
    end: str | None = None,
    ends: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """The rows of a run that ended well, or as `end` has it because of `ends`."""
    world_size = layout.spec.world_size
    file = job.file(folder, f"{output}-{end}.yaml", layout, output=output)
    faults = [*ends, *job.poison(layout, job.poisoned)]
    for happened in folder.glob(f"{output}-faults/done-*"):
        happened.unlink()
    if faults:
        ranks = start_faulty_trainer(world_size, file, folder / output, faults)
    else:
        ranks = start_trainer(world_size, file, folder / output)
    ended = finish(ranks, timeout_seconds=_SECONDS)
    allowed = {0} if end is None else _EXIT_CODES[end]
    codes = {code for code, _ in ended}
    assert codes <= allowed, f"{output}, {[fault['kind'] for fault in faults]}: {codes}: {_last_words(ended)}"
    return rows_of(folder / output)


def exported(job: WholeJob, folder: Path, output: str) -> dict[str, torch.Tensor]:
    """The tensors of the files that the job's last checkpoint is exported as. Of a whole model AssertionError unless
    transformers finds each of its weights in them."""
    place = folder / f"{output}-export"
    export(Export(job.place(folder, output), place, **job.exported))
    if job.content["model"].get("adapter") is None or job.exported["merge"]:
        _, told = _READERS[job.content.get("task", "causal_lm")].from_pretrained(place, output_loading_info=True)
        assert not any(told.values()), f"{output}: transformers loads it with {told}"
    found: dict[str, torch.Tensor] = {}
    for path in place.glob("*.safetensors"):
        found |= load_file(path)
    return found


def worst_tensor(wanted: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to the tensor's own: of those that both have, the worst."""
    worst = 0.0
    for name in wanted.keys() & ours.keys():
        if _WITHOUT_GRADIENT.search(name):
            continue
        scale = float(wanted[name].double().norm()) or 1.0
        worst = _worse(worst, float((ours[name].double() - wanted[name].double()).norm()) / scale)
    return worst


def _worse(worst: float, error: float) -> float:
    """What is no number, which max() passes over, is worst of all."""
    return max(worst, error) if math.isfinite(error) else math.inf


def _last_words(ended: list[tuple[int, str]]) -> str:
    return "\n".join(f"rank {rank} exited {code}: {text[-1500:]}" for rank, (code, text) in enumerate(ended))


def odds(rows: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> list[str]:
    """What should be exactly the same of a job's rows, and isn't."""
    found = []
    for name in ("step", "tokens", "images"):
        ours, theirs = ([row.get(name) for row in some] for some in (rows, wanted))
        if ours != theirs:
            found.append(f"whole job: {name}: {ours}, one process {theirs}")
    ours, theirs = ([sorted(_figures(row)) for row in some] for some in (rows, wanted))
    if ours != theirs:
        found.append(f"whole job: figures: {ours}, one process {theirs}")
    return found


def was_gone_on_with(rows: Sequence[dict[str, Any]], num_starts: int = 2) -> bool:
    """Whether the first start's steps are there, and after them each later one's."""
    attempts = [row["attempt"] for row in rows]
    return attempts == sorted(attempts) and set(attempts) == set(range(1, num_starts + 1))


def worst_difference(rows: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> float:
    """Relative, over the figures that both have of a step."""
    worst = 0.0
    for ours, theirs in zip(map(_figures, rows), map(_figures, wanted), strict=False):
        for name in ours.keys() & theirs.keys():
            worst = _worse(worst, abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-12))
    return worst


def _figures(row: dict[str, Any]) -> dict[str, float]:
    found = {name: row[name] for name in _COMPARED if row.get(name) is not None}
    return found | {name: one["loss"] for name, one in row.get("validation_sets", {}).items()}
