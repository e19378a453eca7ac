"""A parity campaign: jobs drawn at random, each compared with one process, and saved and resumed in another layout.

    scripts/parity_campaign --seeds 40 --json results.json

The table of `parity.table` holds what somebody thought of. A seed here (`draws`) is a job of what language models are
mostly trained with (no NVMe): a family with sizes of its own, full or with an adapter, an optimizer, a schedule, packed
or not, a router's auxiliary loss; and two layouts of it, of any degrees, micro-batch, recomputation, unit sizes and
chunks of the loss, some with compiled blocks. Some are of families that no table names (`others`). What must hold:

- under the first layout losses, gradient norms, the validation loss and the last weights are those of one process;
- what is saved there at a random step and resumed by new processes of the same layout goes on bit for bit;
- resumed under the second layout it ends as one process does;
- the trainer's own command, on files of a random kind, ended midway under the first layout and started again under the
  second, does every step once, with exactly the tokens of one process (`whole_jobs`);
- a layout that isn't taken is refused in one line (they are counted, and drawn again).

Equal means `TOLERANCES`: 1e-7 in float64, 1e-5 in float32, where of weights only a hundredth is asked: optimizers
divide small gradients by their own size. Some jobs make more of a rounding than that (a random model's router under
Muon, norms that begin at zero under Adafactor): one process runs twice, the second time a sequence at a time (and for
three or six ranks in another `OTHER_SCALE`), and layouts may be `OWN_FACTOR` times as far off as it is from itself, but
never more than `MOST`.

Jobs that are rounded to 16 bits or 8 (bf16, fp16, emulated fp8, 8-bit AdamW), or draw numbers in each step (dropout,
noise in routers), are not compared so: of them only the loss is held against one process, loosely (`ROUGH`). They prove
their resumes' bits, fp16's loss scale among them, by the engines and by the trainer's own command, which then goes on
under the first layout.

The exit code is 0 when all of it held. `--first-seed N --seeds 1` plays one again.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[3])]

import torch
from trainer.models.build import build_model
from trainer_testing.seeds import Seed, command, refused_lines
from trainer_testing.strategy_worker import FIGURES, Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from benchmarks.machine import describe
from parity.draws import Drawn, Layout, draw
from parity.others import draw_other, is_of_others
from parity.pictures import DrawnPictures, draw_pictures, is_of_pictures, whole_pictures
from parity.table import TOLERANCES
from parity.whole_jobs import run_whole, whole_job

ROUGH = 0.2
"""Of the loss of a job that is not compared: what is plainly wrong is more."""
NUMBERS_TOLERANCES = TOLERANCES | {"bits": ROUGH}
WEIGHTS_TOLERANCES = {"fp64": 1e-7, "fp32": 1e-2, "bits": math.inf}
OWN_FACTOR = 30.0
MOST = {"fp64": 1e-5, "fp32": 1e-3, "bits": ROUGH}
"""What no rounding of one process makes up for: of a job whose own is more, nothing is proved."""
LEAST_LEARNT = 1e-4
"""Of the loss: how far the steps of one process lie apart, at least."""
OTHER_SCALE = 3.0
"""Of the loss of the process that accumulates, where a layout has three or six ranks: many norms round to fp32 in fp64
jobs, too, and what is divided by three is rounded otherwise. One process in that scale has their very figures."""
RUN_SECONDS = 300
EXPORTED = 30.0
"""How many times as far off as its figures one process's weights may be, if not more by the engines' runs: those of
the command's are not compared with each other."""
WHO = ("one process", "first", "second", "whole job")
_LAST_WORDS = 1500
"""Characters of a run that failed."""


@dataclass
class Played(Seed):
    """A seed, and what came of it."""

    precision: str
    """fp64, fp32: what it is compared in; bits: only its resumes are."""
    job: str
    first: str
    second: str
    saved_at: int
    errors: dict[str, float] = field(default_factory=dict)
    """Worst relative difference from one process, of numbers and of weights: its own, accumulating; each layout's."""
    commit: str = ""
    """Of the code that was played."""
    whole: str = ""
    """The job file of the trainer's own command, but for its layout, and how its first run was ended."""


def play(drawn: Drawn, folder: Path) -> Played:
    """All runs of a seed, in `folder`."""
    started = time.monotonic()
    words = _words(drawn), _layout_words(drawn.first), _layout_words(drawn.second)
    told = Played(drawn.seed, drawn.proof, *words, drawn.saved_at)
    told.refused, told.commit = dict(drawn.refused), str(describe()["commit"])
    try:
        if not isinstance(drawn, DrawnPictures):
            _compare(drawn, folder, told)
        _play_whole(drawn, folder, told)
    except AssertionError as error:
        told.problems.append(str(error)[-_LAST_WORDS:])
    told.seconds = round(time.monotonic() - started, 1)
    return told


def _compare(drawn: Drawn, folder: Path, told: Played) -> None:
    source, weights, saved = folder / "base", folder / "weights.pt", folder / "saved"
    if drawn.base is not None:
        plain = tiny_job("single", 1, model=drawn.model, document_masks=False)
        model = build_model(plain, vocab_size=VOCAB_SIZE).to(getattr(torch, drawn.base.dtype))
        model.save_pretrained(source, max_shard_size=drawn.base.max_shard_size)
    parts = drawn.ranks(drawn.parts, source, weights, loss_scale=_scale(drawn))
    alone, own = run(1, [drawn.alone(source, weights), parts], RUN_SECONDS)
    apart = max(alone["loss"]) / min(alone["loss"]) - 1
    if not apart > LEAST_LEARNT:
        told.problems.append(f"one process: what doesn't learn proves nothing: {alone['loss']}")
    _note(told, "one process", own, alone)
    ranks, others = (drawn.ranks(layout, source, weights) for layout in (drawn.first, drawn.second))
    (whole,) = _run(drawn.first, [replace(ranks, save=str(saved), save_after_step=drawn.saved_at)])
    if not any(whole["applied"]):
        told.problems.append("first: no step was made, of which nothing is proved")
    resumed = {"first_step": drawn.saved_at + 1, "load": str(saved)}
    (same,) = _run(drawn.first, [replace(ranks, **resumed)])
    (moved,) = _run(drawn.second, [replace(others, **resumed)])
    for name, result in (("first", whole), ("second", moved)):
        _note(told, name, result, alone)
        _judge(told, name)
    told.problems += _other_bits(same, whole, drawn.saved_at)


def _scale(drawn: Drawn) -> float:
    is_divided = any(layout.spec.world_size % 3 == 0 for layout in (drawn.first, drawn.second))
    return OTHER_SCALE if is_divided and drawn.is_exact else 1.0


def _other_bits(same: Result, whole: Result, saved_at: int) -> list[str]:
    """What is not exactly so of a run that was resumed as of one that was not."""
    found = []
    for key in ("loss", "grad_norm", "applied", "validation", "engine"):
        wanted = whole[key] if key in ("validation", "engine") else whole[key][saved_at:]
        if same[key] != wanted:
            found.append(f"resumed at its own layout, {key} is {same[key]}, not {wanted}")
    # Both from the same reference, averages included: another bit anywhere is another distance.
    if same["weights_error"] != whole["weights_error"] or not math.isfinite(whole["weights_error"]):
        found.append(f"resumed at its own layout, its weights are off by {same['weights_error']}")
    return found


def _play_whole(drawn: Drawn, folder: Path, told: Played) -> None:
    place = folder / "whole"
    place.mkdir()
    is_of_pictures = isinstance(drawn, DrawnPictures)
    job = whole_pictures(drawn, place) if is_of_pictures else whole_job(drawn, place, folder / "base")
    told.whole = f"{job.words}: {json.dumps(job.content).replace(str(folder), 'FOLDER')}"
    errors, problems = run_whole(job, place)
    told.problems += problems
    if not drawn.is_exact:
        return
    own = max(errors["own"], told.errors.get("one process numbers", 0.0))  # the command has one scale alone
    told.errors |= {"one process whole": own, "whole job whole": errors["job"]}
    _judge(told, "whole job", ("whole",))
    own = max(EXPORTED * own, told.errors.get("one process weights", 0.0))
    told.errors |= {"whole job exported": errors["export"], "one process exported": own}
    _judge(told, "whole job", ("exported",))


def _run(layout: Layout, requests: Sequence[RunRequest]) -> list[Result]:
    return run(layout.spec.world_size, requests, RUN_SECONDS)


def _note(told: Played, name: str, result: Result, alone: Result) -> None:
    keys = ("loss", "validation") if told.precision == "bits" else FIGURES
    told.errors[f"{name} numbers"] = worst_relative_error(result, alone, keys)
    told.errors[f"{name} weights"] = result["weights_error"]


def _judge(told: Played, name: str, figures: Sequence[str] = ("numbers", "weights")) -> None:
    for what in figures:
        usual = WEIGHTS_TOLERANCES if what in ("weights", "exported") else NUMBERS_TOLERANCES
        error, own = told.errors[f"{name} {what}"], told.errors[f"one process {what}"]
        allowed = max(usual[told.precision], min(OWN_FACTOR * own, MOST[told.precision]))
        if not (math.isfinite(error) and error <= allowed):
            told.problems.append(f"{name}: {what} are {error:.1e} off one process, allowed {allowed:.0e}")


def _words(drawn: Drawn) -> str:
    model = {
        name: value for name, value in drawn.model.items() if name not in ("model_type", "max_position_embeddings")
    }
    parts = {"model": model, "adapter": drawn.adapter, "packed": drawn.is_packed} | drawn.training
    parts |= {"micro-batch": drawn.micro_batch_size, "noisy": drawn.is_noisy, "growth": drawn.growth_steps}
    parts |= {"in 8 bits": True} if drawn.is_narrow else {}
    parts |= {"attention": drawn.attention, "base": drawn.base and asdict(drawn.base)}
    return f"{drawn.family}: {json.dumps(parts)}"


def _layout_words(layout: Layout) -> str:
    return f"{layout.strategy}: {json.dumps(asdict(layout))}"


def table(rows: Sequence[Played]) -> str:
    """For people: how many held, how far off the worst were, what was refused, what did not hold."""
    good = [row for row in rows if not row.problems]
    lines = [f"{len(good)} of {len(rows)} jobs equal one process, resume bit for bit, and go on in another layout"]
    for name in (f"{who} {what}" for what in ("numbers", "weights", "whole", "exported") for who in WHO):
        for precision in NUMBERS_TOLERANCES:
            errors = [row.errors[name] for row in rows if name in row.errors and row.precision == precision]
            if errors:
                lines.append(f"  {precision} {name:<19} median {median(errors):.0e}, worst {max(errors):.1e}")
    lines += refused_lines(rows)
    for row in rows:
        runs = f"  {row.job}\n  first {row.first}\n  second {row.second}\n  whole {row.whole}"
        lines += [f"PROBLEM seed {row.seed}: {problem}\n{runs}" for problem in row.problems]
    return "\n".join(lines)


def play_seed(seed: int) -> Played:
    """The seed's runs, in a folder that goes with them."""
    with tempfile.TemporaryDirectory(prefix="parity-campaign-") as folder:
        drawn = draw_pictures if is_of_pictures(seed) else draw_other if is_of_others(seed) else draw
        return play(drawn(seed), Path(folder))


def words(row: Played) -> str:
    """A seed in a line."""
    came = "; ".join(row.problems) if row.problems else ", ".join(f"{n} {e:.0e}" for n, e in row.errors.items())
    return f"{row.job[:40]} {row.first[:24]} -> {row.second[:24]}: {came}"


def main() -> int:
    """The command; its exit code."""
    described = "Random jobs, each against one process."
    return command("parity_campaign", described, kind=Played, play=play_seed, words=words, table=table, num_seeds=20)


if __name__ == "__main__":
    sys.exit(main())
