"""A checkpoint as Hugging Face files: `python -m trainer.export --checkpoints PLACE --to FOLDER`.

    --checkpoints PLACE    a job's checkpoint destination, a folder or s3://
    --to FOLDER|s3://      to S3, file by file: this machine holds one file of weights (--max-shard-bytes) at a time
    --continue             in S3, write over the files of this very export that an interrupted run left
    --step N               default: the newest good one
    --average              the running average of the weights (training.optimizer.average_decay)
    --merge                an adapter put into its base model, instead of the adapter alone in peft's format
    --base FOLDER          the base model of --merge, and of what was frozen, where it isn't at model.source any more
    --tokenizer FOLDER     whose tokenizer goes along; default: the job's
    --dtype float32|bfloat16|float16    default: as saved

Any layout's checkpoint will do, and nothing else is needed: it describes its model itself. What `from_pretrained` reads
comes out: config.json, generation_config.json, model*.safetensors with an index where sharded, and the tokenizer.
Experts that transformers packs are written one by one, as Hugging Face's files have them. One process, no GPU; in
memory is one tensor of the checkpoint and what becomes of it, so that a machine far smaller than the model does it.
Only the bytes of the weights are read, and each is compared with the manifest's hashes. The folder appears whole or not
at all; in S3, `export.json` with all files' sizes and SHA-256 is written last. Prints one line of JSON. Exit codes as
the trainer's.
"""

import argparse
import hashlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from trainer.checkpoint import Checkpointer
from trainer.checkpoint.base_model import FROZEN
from trainer.checkpoint.destination import DestinationError, MissingFileError, open_destination, with_retries
from trainer.checkpoint.reading import AlteredError
from trainer.checkpoint.restore import OpenStep
from trainer.data.byte_tokenizer import write_byte_tokenizer
from trainer.export_base import BaseFolder, read_base, with_frozen
from trainer.export_layouts import Read, adapter_groups, model_groups, write_adapter_config
from trainer.export_merged import merged_groups
from trainer.export_scratch import scratch_beside
from trainer.export_weights import Described, Group, keep, write_shards
from trainer.optimizers.router_bias import BUFFER as ROUTER_BIAS
from trainyard.errors import AwsRefusedError, InputError, JobFailedError, TrainyardError
from trainyard.spec.checkpoint_names import why_not_written
from trainyard.spec.job import AdapterSpec

DEFAULT_SHARD_BYTES = 5 << 30
DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MODEL, _OPTIMIZER, _AVERAGE = "model.", "optim.", ".average"
"""Names in a checkpoint: weights and buffers, and `optim.<name>.average` for the running average of a weight."""
_CHAT_TEMPLATE = "chat_template.jinja"
"""Which transformers takes before what tokenizer_config.json says."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    _CHAT_TEMPLATE,
    "chat_template.json",
)
"""What transformers' tokenizers read; those that are there are copied, of one tokenizer."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""What its processors of images read."""
_GENERATION_CONFIG = "generation_config.json"
_NUM_MISSES = 2
"""So often the newest checkpoint may be removed by its job while it is exported."""
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LISTING = "export.json"
"""Of an export in S3: its files with their sizes and SHA-256, written last. Without it the export is not whole."""


@dataclass(frozen=True)
class Export:
    """What is asked for."""

    checkpoints: str
    """A folder or s3://."""
    to: Path | str
    """A folder, or an s3:// prefix."""
    step: int | None = None
    """None: the newest good one."""
    average: bool = False
    merge: bool = False
    base: Path | None = None
    tokenizer: str | None = None
    beside: tuple[str, ...] = ()
    """Where the job's tokenizer and model lie outside of its hosts, whose own paths are nothing on this machine."""
    dtype: torch.dtype | None = None
    """None: as saved."""
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    goes_on: bool = False
    """To S3: write over what an interrupted run of this very export left; else the prefix must be empty."""


def export(asked: Export) -> dict[str, Any]:
    """Write the export; what was written, as JSON values. InputError, JobFailedError or AwsRefusedError in one line."""
    to_s3 = isinstance(asked.to, str)
    try:
        written = _to_s3(asked, asked.to) if isinstance(asked.to, str) else _newest_to_folder(asked, asked.to)
    except AlteredError as error:
        raise JobFailedError(f"{asked.checkpoints}: {error}; --step takes another checkpoint") from None
    except MissingFileError as error:
        raise JobFailedError(
            f"{asked.checkpoints}: {error}; where its job, which runs, no longer keeps that checkpoint: export again,"
            " or a copy (`trainyard checkpoints copy`)"
        ) from None
    except DestinationError as error:
        by_aws = to_s3 or asked.checkpoints.startswith("s3://")
        raise (AwsRefusedError if by_aws else JobFailedError)(str(error)) from None
    except OSError as error:
        raise JobFailedError(f"can't write {asked.to}: {error.strerror or error}") from None
    return {"to": str(asked.to), **written}


def _newest_to_folder(asked: Export, to: Path) -> dict[str, Any]:
    """As `_to_folder`, of a newer one where a job that runs has removed what was the newest: nothing is written yet."""
    for _ in range(_NUM_MISSES if asked.step is None else 0):
        try:
            return _to_folder(asked, to)
        except MissingFileError as error:
            _report(f"{error}: its job no longer keeps that checkpoint; the newest is taken")
    return _to_folder(asked, to)


def _to_folder(asked: Export, to: Path) -> dict[str, Any]:
    # Beside the result: where the model has room, its checkpoint most likely has too.
    with scratch_beside(to) as scratch:
        partial = scratch / "export"
        partial.mkdir(mode=0o755)
        step = _open(asked, scratch)
        written = _write(asked, step, partial)
        to = to.resolve()
        if to.exists():
            to.rmdir()
        partial.replace(to)
    return {"step": step.manifest.step, **written}


def _to_s3(asked: Export, to: str) -> dict[str, Any]:
    """File by file, the list of them last: a whole export is never written over, nor anything that is not of it."""
    destination = open_destination(to)
    there = {name for name in destination.sizes("") if name}  # without the prefix's own mark, which consoles make
    if LISTING in there:
        raise InputError(f"--to {to}: holds an export already; give another prefix")
    if there and not asked.goes_on:
        raise InputError(f"--to {to}: is not empty ({min(there)} is there); give another prefix")
    files: dict[str, dict[str, Any]] = {}

    def send(path: Path) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
        with_retries(lambda: destination.put_file(path.name, path), what=path.name, report=_report)
        path.unlink()

    with tempfile.TemporaryDirectory(prefix="trainyard-export-") as scratch:
        folder = Path(scratch) / "export"
        folder.mkdir()
        step = _open(asked, Path(scratch))
        written = {"step": step.manifest.step, **_write(asked, step, folder, finished=send)}
        for path in sorted(folder.iterdir()):
            send(path)
    if foreign := sorted(there - set(files)):
        raise JobFailedError(
            f"--to {to}: {foreign[0]} is there and is not of this export, which has no {LISTING} therefore: give the "
            "--max-shard-gib of the run that was interrupted, or another prefix (promote: another --model)"
        )
    listing = {"version": 1, "checkpoint": step.uri, **written, "files": dict(sorted(files.items()))}
    content = (json.dumps(listing, indent=1) + "\n").encode()
    with_retries(lambda: destination.put_bytes(LISTING, content), what=LISTING, report=_report)
    return {**written, "listing_sha256": hashlib.sha256(content).hexdigest()}


def _report(line: str) -> None:
    print(line, file=sys.stderr)


def _open(asked: Export, scratch: Path) -> OpenStep:
    checkpointer = Checkpointer(
        asked.checkpoints,
        rank=0,
        world_size=1,
        local_dir=scratch,
        keep_last=1,
        asynchronous=False,
        report=_report,
    )
    step = checkpointer.open_step(asked.step)
    if step is None:
        wanted = "no valid checkpoint" if asked.step is None else f"no valid checkpoint of step {asked.step}"
        raise InputError(f"{asked.checkpoints}: {wanted} is there; `trainyard checkpoints list` shows what is")
    return step


def _write(asked: Export, step: OpenStep, folder: Path, *, finished: Callable[[Path], None] = keep) -> dict[str, Any]:
    """The files of the export in `folder`; `finished` may take the weights' away, one by one."""
    extra = step.manifest.extra
    config = extra.get("model_config")
    if not isinstance(config, dict):
        raise InputError(f"{step.uri}: holds no model_config: it was saved by an older trainer, or is no model's")
    stored = _stored(step, average=asked.average)
    if not stored:
        raise InputError(f"{step.uri}: holds no weights of a model")
    read = _reader(step, stored)
    described = [tensor for tensor, _ in stored]
    if not any(_is_adapter(tensor.name) for tensor in described):
        if asked.merge:
            raise InputError(f"--merge: {step.uri} holds a whole model, no adapter; leave the option out")
        groups, kind, stem = _of_model(config, extra, described, read, folder, asked.base), "model", "model"
    else:
        adapter, source = _adapter_of(step)
        if asked.merge:
            base = BaseFolder.of(asked.base, source, why="--merge")
            mend = "give --base FOLDER, or leave --merge out and let peft merge it"
            base.check(extra.get("base"), what="the adapter", mend=mend)
            model = read_base(base, extra.get("model_class"))
            groups, stem, kind = merged_groups(model, adapter, described, read), "model", "merged model"
            if base.is_whole(config):
                shutil.copyfile(base.path / "config.json", folder / "config.json")
            else:
                _write_config(folder, config, model.model)
        else:
            groups, stem, kind = adapter_groups(described, read), "adapter_model", "adapter"
            write_adapter_config(folder, adapter, base_model=source)
    if asked.dtype is not None:
        kept = [] if kind == "adapter" else _kept_in_float32(config, extra.get("model_class"))
        groups = _in_type(groups, asked.dtype, kept)
    limit = asked.max_shard_bytes if kind != "adapter" else sys.maxsize
    files = write_shards(folder, groups, stem=stem, max_shard_bytes=limit, finished=finished)
    if kind != "adapter":
        _set_type(folder / "config.json", groups)
    beside = _copy_beside(asked, extra, folder)
    tensors = [tensor for group in groups for tensor in group.tensors]
    return {
        "kind": kind,
        "files": files,
        "beside": beside,
        "num_tensors": len(tensors),
        "num_bytes": sum(tensor.num_bytes for tensor in tensors),
    }


def _stored(step: OpenStep, *, average: bool) -> list[tuple[Described, str]]:
    """The model's tensors under their own names, and what each is called in the checkpoint."""
    index = step.index.state_dict_metadata
    saved = {name: entry for name, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
    found: dict[str, str] = {}
    for name in saved:
        if name.startswith((_MODEL, FROZEN)):
            found[name.removeprefix(_MODEL).removeprefix(FROZEN)] = name
    if average:
        averages = {
            name.removeprefix(_OPTIMIZER).removesuffix(_AVERAGE): name
            for name in saved
            if name.startswith(_OPTIMIZER) and name.endswith(_AVERAGE)
        }
        if not averages:
            raise InputError("--average: the job keeps no average; it would need training.optimizer.average_decay")
        found |= averages
    return [(Described(name, tuple(saved[key].size), saved[key].properties.dtype), key) for name, key in found.items()]


def _reader(step: OpenStep, stored: Sequence[tuple[Described, str]]) -> Read:
    keys = {tensor.name: key for tensor, key in stored}
    return lambda name: step.tensor(keys[name])


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _of_model(
    config: dict[str, Any],
    extra: dict[str, Any],
    tensors: Sequence[Described],
    read: Read,
    folder: Path,
    base: Path | None,
) -> list[Group]:
    model = _outline(config, extra.get("model_class"))
    groups = model_groups(model, *with_frozen(model, tensors, read, extra, base))
    _write_config(folder, config, model)
    if model.can_generate():
        GenerationConfig.from_model_config(model.config).save_pretrained(folder)
    return groups


def _write_config(folder: Path, config: dict[str, Any], model: PreTrainedModel) -> None:
    content = config | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _outline(config: dict[str, Any], class_name: str | None) -> PreTrainedModel:
    """The model without memory for its weights: what knows how its files name them."""
    import transformers

    settings = dict(config)
    try:
        known = AutoConfig.for_model(settings.pop("model_type"), **settings)
        kind = getattr(transformers, class_name or (config.get("architectures") or ["AutoModelForCausalLM"])[0])
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        with torch.device("meta"):
            model = make(known)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise InputError(f"the checkpoint's model can't be made with this transformers: {words}") from None
    assert isinstance(model, PreTrainedModel)
    return model


def _adapter_of(step: OpenStep) -> tuple[AdapterSpec, str]:
    settings, source = step.manifest.extra.get("adapter"), step.manifest.extra.get("model_source")
    if settings is None or source is None:
        raise InputError(f"{step.uri}: holds an adapter and doesn't say of what: it was saved by an older trainer")
    return AdapterSpec.model_validate(settings), str(source)


def _in_type(groups: Sequence[Group], dtype: torch.dtype, kept: Sequence[str]) -> list[Group]:
    """The groups with tensors of floating point in that type; counters, masks and what `kept` names stay themselves."""

    def typed(tensor: Described) -> Described:
        stays = not tensor.dtype.is_floating_point or any(f".{name}." in f".{tensor.name}." for name in kept)
        return tensor if stays else replace(tensor, dtype=dtype)

    return [replace(group, tensors=tuple(map(typed, group.tensors))) for group in groups]


def _kept_in_float32(config: dict[str, Any], class_name: str | None) -> list[str]:
    """Parts of names of what transformers holds in float32 whatever a model's type is, as it would round it no more:
    DeepSeek-V3's router bias, whose small differences decide which experts a token goes to. That of every family:
    of MiniMax-M2's it holds none."""
    return [ROUTER_BIAS, *(getattr(_outline(config, class_name), "_keep_in_fp32_modules_strict", None) or ())]


def _set_type(path: Path, groups: Sequence[Group]) -> None:
    """What the configuration says of the weights' type is what they have: the commonest."""
    sizes: dict[str, int] = {}
    for tensor in (tensor for group in groups for tensor in group.tensors):
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # what `dtype` was called before transformers 5
    config["dtype"] = max(sizes, key=lambda name: sizes[name])
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_beside(asked: Export, extra: dict[str, Any], folder: Path) -> list[str]:
    """Tokenizer and generation settings of the job's own source, as far as this machine can read them."""
    source = str(asked.base) if asked.base is not None else extra.get("model_source")
    further = () if asked.tokenizer is not None else asked.beside
    places = [place for place in (asked.tokenizer or extra.get("tokenizer"), source, *further) if place]
    copied = []
    for names, of in ((_TOKENIZER_FILES, _of_one_tokenizer(places)), (_PROCESSOR_FILES, places)):
        copied += [name for name in names if any(_copy_small(place, name, folder) for place in of)]
    if asked.tokenizer is not None and not copied:
        raise InputError(f"--tokenizer {asked.tokenizer}: no file of a tokenizer is there")
    if extra.get("reads_bytes") and not any(name in copied for name in _TOKENIZER_FILES):
        copied += write_byte_tokenizer(folder)
    template = extra.get("chat_template")
    if isinstance(template, str):
        # What the job's chats were rendered by comes before the tokenizer's own, of whichever file, and of whichever
        # place: the model was taught no other prompts.
        (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        copied = [*(name for name in copied if name != _CHAT_TEMPLATE), _CHAT_TEMPLATE]
    if any(_copy_small(place, _GENERATION_CONFIG, folder) for place in (source, *asked.beside) if place):
        copied.append(_GENERATION_CONFIG)
    return copied


def _of_one_tokenizer(places: Sequence[str]) -> list[str]:
    """The first place that has files of a tokenizer, and those that have the same: with another's settings beside it,
    it would read texts otherwise than in training."""
    there = [place for place in places if any(_small(place, name) is not None for name in _TOKENIZER_FILES)]
    return [place for place in there if _small(place, "tokenizer.json") == _small(there[0], "tokenizer.json")]


def _copy_small(place: str, name: str, folder: Path) -> bool:
    """Copy a file of that name from a place, see `_small`; whether it was there."""
    content = _small(place, name)
    if content is not None:
        (folder / name).write_bytes(content)
    return content is not None


def _small(place: str, name: str) -> bytes | None:
    """A file of that name in a folder or under an s3:// prefix; None where it isn't there. A place may be the
    tokenizer.json itself (data.tokenizer), whatever its name, which the others lie beside."""
    root, _, tail = place.rpartition("/")
    if Path(place).is_file() or (tail.endswith(".json") and not Path(place).is_dir()):
        place, name = root or ".", tail if name == "tokenizer.json" else name
    try:
        return open_destination(place).get_bytes(name)
    except (MissingFileError, DestinationError, InputError):
        return None  # nothing of the weights hangs on it: the result says what came along


def _place(text: str) -> Path | str:
    if (why := why_not_written(text)) is not None:
        raise argparse.ArgumentTypeError(f"{text}: {why}")
    return text if text.startswith("s3://") else Path(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.export", description="Write a checkpoint as Hugging Face files."
    )
    parser.add_argument("--checkpoints", required=True, help="a job's checkpoint destination: a folder or s3://")
    parser.add_argument("--to", type=_place, required=True, help="a folder that is empty or not there yet, or s3://")
    parser.add_argument("--step", type=int, help="default: the newest good one")
    parser.add_argument("--average", action="store_true", help="the running average (training.optimizer.average_decay)")
    parser.add_argument("--merge", action="store_true", help="put the adapter into its base model")
    parser.add_argument("--base", type=Path, help="folder of the model that was begun with; default: model.source")
    parser.add_argument("--tokenizer", help="folder whose tokenizer goes along; default: the job's")
    parser.add_argument("--beside", action="append", default=[], help="where else the job's tokenizer may lie: s3://")
    parser.add_argument("--dtype", choices=sorted(DTYPE_NAMES), help="type of the weights; default: as saved")
    parser.add_argument("--max-shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="largest file of weights")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="write over what a killed run left")
    options = vars(parser.parse_args(arguments))
    options["beside"] = tuple(options["beside"])
    options["dtype"] = DTYPE_NAMES[options["dtype"]] if options["dtype"] else None
    try:
        written = export(Export(**options))
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    print(json.dumps(written), flush=True)
    return 0


def command() -> NoReturn:
    """`main`, which removes what it has written so far where it is told to end (exit code 130)."""
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays
            signal.signal(number, _leave_tidily)
    sys.exit(main())


def _leave_tidily(_: int, __: FrameType | None) -> NoReturn:
    for number in _ENDINGS:  # one that comes while what was written is removed would leave the rest
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(130)


if __name__ == "__main__":
    command()
