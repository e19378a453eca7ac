"""What does a checkpoint cost? Blocked time, save, restore and reshard, beside everybody else's, in turns.

    python benchmarks/checkpoint.py [--state-mib 100 500 2048] [--ranks 1 2] [--rounds 3] [--scratch DIR]

One process a rank makes a Llama with AdamW's state and saves it with each contender in turn, another one beginning each
round, so that a slow second of the machine falls on all alike. Every contender saves the same weights and moments, as
its documentation says:

    ours        trainer.checkpoint, asynchronous: copy to host memory, then write, fsync, hash, commit behind
    torch.save  one file a rank (of its own shards where there are two ranks)
    dcp         torch.distributed.checkpoint.save
    dcp async   torch.distributed.checkpoint.async_save, its default: a thread
    trainer     Hugging Face Trainer's own checkpoint (one rank alone)
    deepspeed   its engine's save_checkpoint, ZeRO stage 1

    copy        no save: every rank's values copied to memory that is there, by one thread, what a save can't do without

blocked: until the call returns. saved: until the files are complete; ours is on the disk by then (fsync) and hashed,
the others' may be in the page cache. restore: into memory that is there, from files that are not in the page cache
(written back, then dropped with posix_fadvise); ours verifies every byte. The disk's own limits are measured in the
same turns, with one file a rank of the same size in all: write and fsync, and read.
training_speed: steps of a small model while saves are on their way, to steps without one; one thread a rank trains.
What is blocked is not in it. It is judged where a rank has a core more than it trains with, as ranks on a GPU do.
reshard: what one world wrote, sharded, read by a world of another size (ours and dcp know how to), cold too.

Goals: blocked at most 1/5 of the best synchronous peer's, or, where the copy alone takes more than that (ranks that
have all cores between them: a peer's save into the page cache is a copy too), no longer than 1.3 times the copy; and
no more than dcp async's; restore at least 0.9 of the disk's read speed, and no longer than dcp's; training keeps 0.95
of its speed. Exit code 1 when one is missed. The result is kept in benchmarks/results.
"""

import argparse
import gc
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from trainer.checkpoint import Checkpointer

RESULTS = Path(__file__).parent / "results"
BYTES_A_PARAMETER = 12
"""float32: a weight and AdamW's two averages."""
MOST_OF_SYNCHRONOUS, MOST_OF_COPY, LEAST_OF_DISK, LEAST_OF_TRAINING = 0.2, 1.3, 0.9, 0.95
RESHARDING = ("ours", "dcp")
ASYNCHRONOUS = ("ours", "dcp async")
SYNCHRONOUS = ("torch.save", "dcp", "trainer", "deepspeed")
_BLOCK_BYTES = 8 << 20
_STEPS_ALONE = 8
_BYTES_BESIDE_TRAINING, _MOST_SAVES_BESIDE_TRAINING = 512 << 20, 4
"""A save of a small state takes four steps, a few ms in which are 2 %: so there are several saves in a row."""

Tensors = dict[str, torch.Tensor]


def _nothing() -> None:
    pass


def _yes() -> bool:
    return True


@dataclass(frozen=True)
class Pending:
    """A save on its way, or one that is complete."""

    wait: Callable[[], None] = _nothing
    """Returns when the files are complete."""
    is_done: Callable[[], bool] = _yes


class Contender:
    """Saves and restores the same state."""

    def save(self, folder: Path) -> Pending:
        """Returns when training may go on."""
        raise NotImplementedError

    def restore(self, folder: Path) -> None:
        """Reads into the memory that the state has."""
        raise NotImplementedError


class Ours(Contender):
    def __init__(self, tensors: Tensors, scratch: Path, group: dist.ProcessGroup | None) -> None:
        self._tensors, self._scratch, self._group = tensors, scratch, group
        self._step = 0
        self._checkpoints: Checkpointer | None = None

    def _open(self, folder: Path) -> Checkpointer:
        return Checkpointer(
            str(folder),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_dir=self._scratch / "local",
            keep_last=2,  # of one alone each save would be read back; 3 are the default
            asynchronous=True,
            process_group=self._group,
            report=lambda line: None,
        )

    def save(self, folder: Path) -> Pending:
        if self._checkpoints is None:
            self._checkpoints = self._open(folder)
        checkpoints, self._step = self._checkpoints, self._step + 1
        checkpoints.save(self._step, self._tensors, {"step": self._step})

        def wait() -> None:
            checkpoints.wait()
            assert checkpoints.last_error is None, checkpoints.last_error

        return Pending(wait, lambda: not checkpoints.is_saving)

    def restore(self, folder: Path) -> None:
        self.restore_into(folder, self._tensors)

    def restore_into(self, folder: Path, tensors: Tensors) -> None:
        """Restores another layout's tensors."""
        fresh = self._open(folder)
        info = fresh.latest(lambda: tensors, may_spoil=True)
        assert info is not None
        fresh.load(info, tensors)
        fresh.close()


class TorchSave(Contender):
    def __init__(self, tensors: Tensors) -> None:
        self._local = {name: _local(tensor) for name, tensor in tensors.items()}

    def save(self, folder: Path) -> Pending:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._local, folder / f"rank-{dist.get_rank()}.pt")
        return Pending()

    def restore(self, folder: Path) -> None:
        read = torch.load(folder / f"rank-{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in self._local.items():
            tensor.copy_(read[name])


class Dcp(Contender):
    def __init__(self, tensors: Tensors, group: dist.ProcessGroup | None, *, asynchronous: bool) -> None:
        self._tensors, self._group, self._asynchronous = tensors, group, asynchronous

    def save(self, folder: Path) -> Pending:
        if not self._asynchronous:
            dcp.save(dict(self._tensors), checkpoint_id=folder)
            return Pending()
        pending: Any = dcp.async_save(dict(self._tensors), checkpoint_id=folder, process_group=self._group)

        return Pending(pending.result, pending.done)

    def restore(self, folder: Path) -> None:
        self.restore_into(folder, self._tensors)

    def restore_into(self, folder: Path, tensors: Tensors) -> None:
        """Restores another layout's tensors."""
        dcp.load(dict(tensors), checkpoint_id=folder)


class HuggingFaceTrainer(Contender):
    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, scratch: Path) -> None:
        from transformers import Trainer, TrainingArguments

        settings = TrainingArguments(
            output_dir=str(scratch / "trainer"), use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self._trainer: Any = Trainer(model=model, args=settings, optimizers=(optimizer, schedule))

    def save(self, folder: Path) -> Pending:
        self._trainer.args.output_dir = str(folder)
        self._trainer._save_checkpoint(self._trainer.model, trial=None)
        return Pending()

    def restore(self, folder: Path) -> None:
        self._trainer._load_from_checkpoint(str(folder / "checkpoint-0"))
        self._trainer._load_optimizer_and_scheduler(str(folder / "checkpoint-0"))


class DeepSpeed(Contender):
    def __init__(self, model: Any) -> None:
        import deepspeed

        # Its messages through shared memory would be compiled now; one rank has none.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        self._engine.backward(self._engine(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss)
        self._engine.step()

    def save(self, folder: Path) -> Pending:
        self._engine.save_checkpoint(str(folder), tag="state")
        return Pending()

    def restore(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="state")


class Copy(Contender):
    """What every save that lets training go on has to do first."""

    def __init__(self, tensors: Tensors) -> None:
        self._pairs = [(torch.zeros_like(local), local) for local in map(_local, tensors.values())]

    def save(self, folder: Path) -> Pending:
        folder.mkdir(parents=True, exist_ok=True)
        for memory, local in self._pairs:
            memory.copy_(local)
        return Pending()

    def restore(self, folder: Path) -> None:
        pass


class Disk(Contender):
    """What the disk itself does with as many bytes in one file a rank."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(os.urandom(min(_BLOCK_BYTES, num_bytes))))
        self._num_bytes = num_bytes

    def save(self, folder: Path) -> Pending:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{dist.get_rank()}").open("wb", buffering=0) as file:
            left = self._num_bytes
            while left:
                left -= file.write(self._buffer[:left])
            os.fsync(file.fileno())
        return Pending()

    def restore(self, folder: Path) -> None:
        with (folder / f"rank-{dist.get_rank()}").open("rb", buffering=0) as file:
            while file.readinto(self._buffer):
                pass


def _local(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return values


def _model(state_bytes: int) -> Any:
    """A Llama whose weights and moments have about so many bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 512
    layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    layers = max(1, round((state_bytes / BYTES_A_PARAMETER - 2 * 1024 * hidden) / layer))
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            vocab_size=1024,
        )
    )


def _state(model: Any, optimizer: torch.optim.Optimizer) -> Tensors:
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        state = optimizer.state[parameter]
        state["step"], state["exp_avg"], state["exp_avg_sq"] = (
            torch.tensor(1.0),
            *map(torch.randn_like, [parameter] * 2),
        )
        tensors |= {f"optim.{name}.{moment}": state[moment].detach() for moment in ("exp_avg", "exp_avg_sq")}
    return tensors


def _sharded(state_bytes: int) -> tuple[Any, torch.optim.Optimizer, Tensors, int]:
    """The model, its optimizer, this rank's shards of their state (all of it in a world of one), the whole's bytes."""
    torch.manual_seed(0)
    model = _model(state_bytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tensors = _state(model, optimizer)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    return model, optimizer, tensors, num_bytes


def _contenders(state_bytes: int, scratch: Path, group: dist.ProcessGroup) -> tuple[dict[str, Contender], int]:
    model, optimizer, tensors, num_bytes = _sharded(state_bytes)
    contenders: dict[str, Contender] = {
        "ours": Ours(tensors, scratch, dist.group.WORLD),
        "torch.save": TorchSave(tensors),
        "dcp": Dcp(tensors, group, asynchronous=False),
        "dcp async": Dcp(tensors, group, asynchronous=True),
        "copy": Copy(tensors),
        "disk": Disk(num_bytes // dist.get_world_size()),
    }
    if dist.get_world_size() == 1:
        contenders["trainer"] = HuggingFaceTrainer(model, optimizer, scratch)
    contenders["deepspeed"] = DeepSpeed(_model(state_bytes))
    return contenders, num_bytes


def _training_step() -> Callable[[], None]:
    """One optimizer step of a small model, on this rank alone: some 50 ms of a core."""
    model = _model(60 << 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(1024, (1, 128))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _training_speed(contender: Contender, folder: Path, step: Callable[[], None], num_saves: int) -> float:
    """Speed of training while saves are on their way, to its speed before, between and after."""

    def seconds() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    dist.barrier()
    alone = [seconds() for _ in range(_STEPS_ALONE)]
    meanwhile = []
    for _ in range(num_saves):
        pending = contender.save(folder)
        meanwhile.append(seconds())
        while not pending.is_done():
            meanwhile.append(seconds())
        pending.wait()
        alone += [seconds() for _ in range(_STEPS_ALONE)]
    dist.barrier()
    return statistics.mean(alone) / statistics.mean(meanwhile)


def _forget(folder: Path) -> None:
    """Make the disk, not the page cache, answer for these files."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        machine.drop_from_page_cache(path)


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def _turn(contender: Contender, folder: Path) -> dict[str, float]:
    """One save and one restore: seconds of this rank."""
    torch.set_num_threads(1)  # importing Trainer and DeepSpeed changes it, and a copy by two threads waits for both
    blocked, pending = _timed(lambda: contender.save(folder))
    begin = time.perf_counter() - blocked
    pending.wait()
    seconds = {"blocked": blocked, "saved": time.perf_counter() - begin}
    _forgotten(folder)
    seconds["restore"], _ = _timed(lambda: contender.restore(folder))
    dist.barrier()
    return seconds


def _forgotten(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        _forget(folder)


def _drop(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def _folder(options: Mapping[str, Any], name: str, ranks: int) -> Path:
    return Path(options["scratch"]) / f"{ranks}-{name.replace(' ', '-')}"


def _in_turn(names: list[str], number: int) -> list[str]:
    """Another one begins each round."""
    return names[number % len(names) :] + names[: number % len(names)]


def _slowest(figures: dict[str, float]) -> dict[str, float]:
    """Of each figure the largest of any rank."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, figures)
    return {key: max(one[key] for one in by_rank) for key in figures}


def _measure(options: Mapping[str, Any], mebibytes: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """A world's turns; what it saved last with who can reshard stays."""
    ranks = dist.get_world_size()
    scratch = Path(options["scratch"]) / f"rank-{dist.get_rank()}"
    contenders, num_bytes = _contenders(mebibytes << 20, scratch, group)
    step = _training_step()
    num_saves = max(1, min(_MOST_SAVES_BESIDE_TRAINING, _BYTES_BESIDE_TRAINING // num_bytes))
    gc.freeze()  # as trainers that care do: nobody's turn pays for a look through the imports' million objects
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    speeds: dict[str, list[float]] = {name: [] for name in ASYNCHRONOUS}
    for number in range(options["rounds"] + 1):
        for name in _in_turn(list(contenders), number):
            folder = _folder(options, name, ranks)
            figures = _slowest(_turn(contenders[name], folder))
            if name in ASYNCHRONOUS:
                if name != "ours":
                    _drop(folder)
                speed = _training_speed(contenders[name], folder, step, num_saves)
                figures["slowdown"] = _slowest({"slowdown": 1 / speed})["slowdown"]
            is_last = number == options["rounds"]
            if name != "ours" and not (name in RESHARDING and is_last):  # ours keeps the newest one itself
                _drop(folder)
            if number:  # the first turn makes plans, buffers and imports
                if "slowdown" in figures:
                    speeds[name].append(1 / figures.pop("slowdown"))
                seconds[name].append(figures)
    return {
        "state_mib": round(num_bytes / 2**20, 1),
        "ranks": ranks,
        "has_spare_cores": len(os.sched_getaffinity(0)) > ranks,
        "seconds": seconds,
        "training_speed": speeds,
    }


def _measure_reshard(options: Mapping[str, Any], mebibytes: int, saved_by: int) -> dict[str, list[float]]:
    """Seconds of reading what a world of another size wrote."""
    _, _, tensors, _ = _sharded(mebibytes << 20)
    expected = {name: _local(tensor).clone() for name, tensor in tensors.items()}
    scratch = Path(options["scratch"]) / f"rank-{dist.get_rank()}"
    group = dist.group.WORLD
    contenders = {"ours": Ours(tensors, scratch, group), "dcp": Dcp(tensors, group, asynchronous=False)}
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options["rounds"] + 1):
        for name in _in_turn(list(contenders), number):
            for tensor in tensors.values():
                _local(tensor).zero_()
            folder = _folder(options, name, saved_by)
            _forgotten(folder)
            figures = _slowest({"restore": _timed(lambda: contenders[name].restore(folder))[0]})  # noqa: B023  # called at once
            assert all(torch.equal(_local(tensors[key]), values) for key, values in expected.items()), name
            if number:
                seconds[name].append(figures["restore"])
    return seconds


def _rank(rank: int, ranks: int, port: int, options: dict[str, Any], mebibytes: int, saved_by: int | None) -> None:
    warnings.filterwarnings("ignore")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    if saved_by is None:
        found: Any = _measure(options, mebibytes, group)
    else:
        found = _measure_reshard(options, mebibytes, saved_by)
    if rank == 0:
        Path(options["result"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # DeepSpeed's and gloo's threads have nothing to say


def _in_world(ranks: int, options: dict[str, Any], mebibytes: int, saved_by: int | None = None) -> Any:
    """What a world of so many processes found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(_rank, (ranks, port, options, mebibytes, saved_by), nprocs=ranks)
    return json.loads(Path(options["result"]).read_text(encoding="utf-8"))


def _judged(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, ratios taken turn by turn, and whether the goals are met."""
    seconds: dict[str, list[dict[str, float]]] = measured["seconds"]
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in turns), 4) for key in turns[0]}
        for name, turns in seconds.items()
    }

    def ratio(key: str, other: str, *, inverse: bool = False) -> float:
        of_turns = [mine[key] / theirs[key] for mine, theirs in zip(seconds["ours"], seconds[other], strict=True)]
        value = statistics.median(of_turns)
        return round(1 / value if inverse else value, 3)

    best = min((name for name in SYNCHRONOUS if name in medians), key=lambda name: medians[name]["blocked"])
    result: dict[str, Any] = {
        "state_mib": measured["state_mib"],
        "median_seconds": medians,
        "disk_mib_per_second": {
            "write": round(measured["state_mib"] / medians["disk"]["saved"]),
            "read": round(measured["state_mib"] / medians["disk"]["restore"]),
        },
        "best_synchronous": best,
        "blocked_to_best_synchronous": ratio("blocked", best),
        "blocked_to_copy": ratio("blocked", "copy"),
        "copy_to_best_synchronous": round(medians["copy"]["blocked"] / medians[best]["blocked"], 3),
        "blocked_to_dcp_async": ratio("blocked", "dcp async"),
        "restore_speed_to_disk": ratio("restore", "disk", inverse=True),
        "restore_to_dcp": ratio("restore", "dcp"),
    }
    result["goals_met"] = {
        "blocked at most 1/5 of the best synchronous, or hardly longer than a copy": (
            result["blocked_to_best_synchronous"] <= MOST_OF_SYNCHRONOUS
            or (result["copy_to_best_synchronous"] > MOST_OF_SYNCHRONOUS and result["blocked_to_copy"] <= MOST_OF_COPY)
        ),
        "blocked no more than dcp async": result["blocked_to_dcp_async"] <= 1,
        "restore at least 0.9 of the disk": result["restore_speed_to_disk"] >= LEAST_OF_DISK,
        "restore no longer than dcp": result["restore_to_dcp"] <= 1,
    }
    if "training_speed" in measured:
        speeds = {name: round(statistics.median(found), 3) for name, found in measured["training_speed"].items()}
        result |= {"ranks": measured["ranks"], "training_speed_while_saving": speeds}
        if measured["has_spare_cores"]:
            result["goals_met"]["training keeps 0.95 of its speed"] = speeds["ours"] >= LEAST_OF_TRAINING
    return result


def _judged_reshard(mebibytes: int, saved_by: int, read_by: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    pairs = zip(seconds["ours"], seconds["dcp"], strict=True)
    to_dcp = round(statistics.median(mine / theirs for mine, theirs in pairs), 3)
    return {
        "state_mib": mebibytes,
        "ranks": f"{saved_by} to {read_by}",
        "median_seconds": {name: round(statistics.median(found), 4) for name, found in seconds.items()},
        "reshard_to_dcp": to_dcp,
        "goals_met": {"reshard no longer than dcp": to_dcp <= 1},
    }


def main() -> int:
    """Runs the benchmark; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state-mib", type=int, nargs="+", default=[100, 500, 2048], help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=(1, 2, 4), help="sizes of the world")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk that is measured; default: a temporary one")
    parser.add_argument("--no-file", action="store_true", help="print the result, keep none")
    options = vars(parser.parse_args())
    before = machine.describe()
    sizes, reshards = [], []
    for mebibytes in options["state_mib"]:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options["scratch"]) as scratch:
            here = options | {"scratch": scratch, "result": f"{scratch}/result.json"}
            for ranks in options["ranks"]:
                sizes.append(_judged(_in_world(ranks, here, mebibytes)))
                print(json.dumps(sizes[-1], indent=1), flush=True)
            for saved_by, read_by in permutations(options["ranks"], 2):
                seconds = _in_world(read_by, here, mebibytes, saved_by)
                reshards.append(_judged_reshard(mebibytes, saved_by, read_by, seconds))
                print(json.dumps(reshards[-1], indent=1), flush=True)
    result = {
        "machine": before,
        "load_average_after": round(os.getloadavg()[0], 2),
        "rounds": options["rounds"],
        "sizes": sizes,
        "reshards": reshards,
    }
    if not options["no_file"]:
        path = RESULTS / f"checkpoint-{machine.file_name(before)}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(all(one["goals_met"].values()) for one in sizes + reshards) else 1


if __name__ == "__main__":
    sys.exit(main())
