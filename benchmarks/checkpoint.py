"""What does a checkpoint cost? Blocked time, save, restore and reshard, beside everybody else's, in turns.

    python benchmarks/checkpoint.py [--state-mib 64 256] [--rounds 3] [--ranks 2] [--scratch DIR]

One process a rank makes a Llama with AdamW's state and saves it with each contender in turn, another one beginning each
round, so that a slow second of the machine falls on all alike. Every contender saves the same weights and moments, as
its documentation says:

    ours        trainer.checkpoint, asynchronous: copy to host memory, then write, fsync, hash, commit behind
    torch.save  one file a rank (of its own shards where there are two ranks)
    dcp         torch.distributed.checkpoint.save
    dcp async   torch.distributed.checkpoint.async_save, its default: a thread
    trainer     Hugging Face Trainer's own checkpoint (one rank alone)
    deepspeed   its engine's save_checkpoint, ZeRO stage 1 (one rank alone)

blocked: until the call returns. saved: until the files are complete; ours is on the disk by then (fsync) and hashed,
the others' may be in the page cache. restore: into memory that is there, from files that are not in the page cache;
ours verifies every byte. reshard: what two ranks wrote, sharded, read whole by each of them (ours and dcp know how to).
The disk's own limits are measured in the same turns, with one file of the same size: write and fsync, and read.

Goals: blocked at most 1/5 of the best synchronous peer's and no more than dcp async's; restore at least 0.9 of the
disk's read speed. Exit code 1 when one is missed. The result is kept in benchmarks/results.
"""

import argparse
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
MOST_OF_SYNCHRONOUS, LEAST_OF_DISK = 0.2, 0.9
SYNCHRONOUS = ("torch.save", "dcp", "trainer", "deepspeed")
_BLOCK_BYTES = 8 << 20

Tensors = dict[str, torch.Tensor]


class Contender:
    """Saves and restores the same state."""

    def save(self, folder: Path) -> Callable[[], None]:
        """Returns when training may go on; what it returns waits until the files are complete."""
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
            keep_last=1,
            asynchronous=True,
            process_group=self._group,
            report=lambda line: None,
        )

    def save(self, folder: Path) -> Callable[[], None]:
        if self._checkpoints is None:
            self._checkpoints = self._open(folder)
        checkpoints, self._step = self._checkpoints, self._step + 1
        checkpoints.save(self._step, self._tensors, {"step": self._step})

        def wait() -> None:
            checkpoints.wait()
            assert checkpoints.last_error is None, checkpoints.last_error

        return wait

    def restore(self, folder: Path) -> None:
        self.restore_into(folder, self._tensors)

    def restore_into(self, folder: Path, tensors: Tensors) -> None:
        """Restores another layout's tensors."""
        fresh = self._open(folder)
        info = fresh.latest(lambda: tensors)
        assert info is not None
        fresh.load(info, tensors)
        fresh.close()


class TorchSave(Contender):
    def __init__(self, tensors: Tensors) -> None:
        self._local = {name: _local(tensor) for name, tensor in tensors.items()}

    def save(self, folder: Path) -> Callable[[], None]:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._local, folder / f"rank-{dist.get_rank()}.pt")
        return lambda: None

    def restore(self, folder: Path) -> None:
        read = torch.load(folder / f"rank-{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in self._local.items():
            tensor.copy_(read[name])


class Dcp(Contender):
    def __init__(self, tensors: Tensors, group: dist.ProcessGroup | None, *, asynchronous: bool) -> None:
        self._tensors, self._group, self._asynchronous = tensors, group, asynchronous

    def save(self, folder: Path) -> Callable[[], None]:
        if not self._asynchronous:
            dcp.save(dict(self._tensors), checkpoint_id=folder)
            return lambda: None
        pending: Any = dcp.async_save(dict(self._tensors), checkpoint_id=folder, process_group=self._group)

        def wait() -> None:
            pending.result()

        return wait

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

    def save(self, folder: Path) -> Callable[[], None]:
        self._trainer.args.output_dir = str(folder)
        self._trainer._save_checkpoint(self._trainer.model, trial=None)
        return lambda: None

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

    def save(self, folder: Path) -> Callable[[], None]:
        self._engine.save_checkpoint(str(folder), tag="state")
        return lambda: None

    def restore(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="state")


class Disk(Contender):
    """What the disk itself does with as many bytes in one file a rank."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(os.urandom(min(_BLOCK_BYTES, num_bytes))))
        self._num_blocks = max(1, num_bytes // len(self._buffer))

    def save(self, folder: Path) -> Callable[[], None]:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{dist.get_rank()}").open("wb", buffering=0) as file:
            for _ in range(self._num_blocks):
                file.write(self._buffer)
            os.fsync(file.fileno())
        return lambda: None

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


def _contenders(state_bytes: int, scratch: Path, group: dist.ProcessGroup) -> tuple[dict[str, Contender], Tensors, int]:
    model = _model(state_bytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = _state(model, optimizer)
    tensors = whole
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    num_bytes = sum(tensor.nbytes for tensor in whole.values())
    contenders: dict[str, Contender] = {
        "ours": Ours(tensors, scratch, dist.group.WORLD),
        "torch.save": TorchSave(tensors),
        "dcp": Dcp(tensors, group, asynchronous=False),
        "dcp async": Dcp(tensors, group, asynchronous=True),
        "disk": Disk(num_bytes // dist.get_world_size()),
    }
    if dist.get_world_size() == 1:
        contenders["trainer"] = HuggingFaceTrainer(model, optimizer, scratch)
        contenders["deepspeed"] = DeepSpeed(_model(state_bytes))
    return contenders, whole, num_bytes


def _forget(folder: Path) -> None:
    """Make the disk, not the page cache, answer for these files."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # a page that isn't written can't be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def _turn(name: str, contender: Contender, whole: Tensors, folder: Path) -> dict[str, float]:
    """One save and one restore: seconds of this rank."""
    torch.set_num_threads(1)  # importing Trainer and DeepSpeed changes it, and a copy by two threads waits for both
    blocked, wait = _timed(lambda: contender.save(folder))
    begin = time.perf_counter() - blocked
    wait()
    seconds = {"blocked": blocked, "saved": time.perf_counter() - begin}
    dist.barrier()
    if dist.get_rank() == 0:
        _forget(folder)
    seconds["restore"], _ = _timed(lambda: contender.restore(folder))
    if dist.get_world_size() > 1 and isinstance(contender, (Ours, Dcp)) and name != "dcp async":
        if dist.get_rank() == 0:
            _forget(folder)
        target = {key: torch.empty_like(tensor) for key, tensor in whole.items()}
        seconds["reshard"], _ = _timed(lambda: contender.restore_into(folder, target))
        assert all(torch.equal(target[key], tensor) for key, tensor in whole.items()), name
    dist.barrier()
    if name != "ours" and dist.get_rank() == 0:
        shutil.rmtree(folder)  # ours keeps the newest one itself
    return seconds


def _rank(rank: int, ranks: int, port: int, options: dict[str, Any]) -> None:
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
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    scratch, found = Path(options["scratch"]), []
    for mebibytes in options["state_mib"]:
        contenders, whole, num_bytes = _contenders(mebibytes << 20, scratch / f"rank-{rank}", group)
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for number in range(options["rounds"] + 1):
            names = list(contenders)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                figures = _turn(name, contenders[name], whole, scratch / f"{mebibytes}-{name.replace(' ', '-')}")
                slowest = [None] * ranks
                dist.all_gather_object(slowest, figures)
                if number:  # the first turn makes plans, buffers and imports
                    seconds[name].append({key: max(one[key] for one in slowest) for key in figures})  # type: ignore[index]
        found.append({"state_mib": round(num_bytes / 2**20, 1), "seconds": seconds})
    if rank == 0:
        Path(options["result"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # DeepSpeed's and gloo's threads have nothing to say


def _judged(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, ratios taken turn by turn, and whether the goals are met."""
    seconds: dict[str, list[dict[str, float]]] = measured["seconds"]
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in turns), 4) for key in turns[0]}
        for name, turns in seconds.items()
    }

    def ratio(key: str, other: str, *, inverse: bool = False) -> float:
        pairs = zip(seconds["ours"], seconds[other], strict=True)
        of_turns = [mine[key] / theirs[key] for mine, theirs in pairs]
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
        "blocked_to_dcp_async": ratio("blocked", "dcp async"),
        "restore_speed_to_disk": ratio("restore", "disk", inverse=True),
        "restore_to_dcp": ratio("restore", "dcp"),
    }
    if "reshard" in medians["ours"]:
        result["reshard_to_dcp"] = ratio("reshard", "dcp")
    result["goals_met"] = {
        "blocked at most 1/5 of the best synchronous": result["blocked_to_best_synchronous"] <= MOST_OF_SYNCHRONOUS,
        "blocked no more than dcp async": result["blocked_to_dcp_async"] <= 1,
        "restore at least 0.9 of the disk": result["restore_speed_to_disk"] >= LEAST_OF_DISK,
    }
    return result


def main() -> int:
    """Runs the benchmark; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state-mib", type=int, nargs="+", default=[64, 256], help="sizes of weights and moments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--scratch", type=Path, help="a folder on the disk that is measured; default: a temporary one")
    parser.add_argument("--no-file", action="store_true", help="print the result, keep none")
    options = vars(parser.parse_args())
    before = machine.describe()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options["scratch"]) as scratch:
        options |= {"scratch": scratch, "result": f"{scratch}/result.json"}
        processes.spawn(_rank, (options["ranks"], port, options), nprocs=options["ranks"])
        found = json.loads(Path(options["result"]).read_text(encoding="utf-8"))
    result = {
        "machine": before,
        "load_average_after": round(os.getloadavg()[0], 2),
        "ranks": options["ranks"],
        "rounds": options["rounds"],
        "sizes": [_judged(measured) for measured in found],
    }
    print(json.dumps(result, indent=1))
    if not options["no_file"]:
        ranks = "1-rank" if options["ranks"] == 1 else f"{options['ranks']}-ranks"
        path = RESULTS / f"checkpoint-{machine.file_name(before)}-{ranks}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(all(one["goals_met"].values()) for one in result["sizes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
