"""The entrypoint, run for real: an /opt/ml tree, torchrun, and a small module in the trainer's place."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainer import entrypoint
from trainer.host.run import Folders, HostRun, Place
from trainer_testing.distributed import free_port

from trainyard.errors import InputError, JobFailedError
from trainyard.functions import job_resumer
from trainyard.spec.job import ResolvedJob

CONTAINER = Path(entrypoint.__file__).resolve().parents[1]
TRAIN_URI = "s3://acme-data/corpus/train"
TOKENIZER_URI = "s3://acme-data/corpus/tokenizer.json"

FAKE_TRAINER = '''
"""Stands for the trainer: no torch; does what the file `behaviour` beside it says for this rank."""
import json, os, pathlib, signal, sys, time
place = pathlib.Path(__file__).parent
rank = os.environ["RANK"]
behaviour = json.loads((place / "behaviour.json").read_text())
todo = behaviour.get(rank, behaviour.get("all", "done"))
output = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
job = json.loads(pathlib.Path(sys.argv[sys.argv.index("--resolved-job") + 1]).read_text())
names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME".split()
seen = {name: os.environ.get(name) for name in names}
(output / f"seen-{rank}.json").write_text(json.dumps({"environment": seen, "job": job,
    "pid": os.getpid(), "arguments": sys.argv}))
def say(line):
    """In one write: print's text and newline are two, and ranks share a pipe."""
    os.write(1, f"{line}\\n".encode())
say(f"step=1 rank={rank}")
if todo == "raise beside rank 0":
    while not (output / "ready-0").exists():
        time.sleep(0.02)
    raise ValueError("boom\\nsecond line")
if todo == "peer loss":
    def is_there():
        seen = output / "seen-1.json"
        try:
            pid = json.loads(seen.read_text())["pid"]
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except FileNotFoundError:
            return not seen.exists()
        except ValueError:  # half written
            return True
    while is_there():  # on a busy machine it may not have begun
        time.sleep(0.02)
    time.sleep(0.3)
    raise RuntimeError("Connection closed by peer [127.0.0.2]:1234")
if todo.startswith("lose a peer"):
    if todo.endswith("after a step"):
        from trainer import heartbeat
        heartbeat.beat(7)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    (output / f"ready-{rank}").write_text("")
    while not stopped:
        time.sleep(0.02)
    raise RuntimeError("Connection closed by peer [127.0.0.2]:1234")
if todo.startswith("bad input"):
    # A rank that fails before the other has started takes it down unstarted.
    while todo.endswith("beside rank 1") and not (output / "ready-1").exists():
        time.sleep(0.02)
    print("trainyard: data.train: no such file or folder", file=sys.stderr)
    raise SystemExit(2)
if todo == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if todo == "half a word":
    os.write(2, b"half a wor")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if todo == "hear a save early":
    (output / f"ready-{rank}").write_text("")
    while not (output / "go on").exists():
        time.sleep(0.02)
    from trainer.early_save import take_early_save
    assert take_early_save()
if todo in ("wait", "save on stop") or todo.startswith("ignore stop"):
    if todo.endswith("after a step"):
        from trainer import heartbeat
        heartbeat.beat(7)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(time.time()))
    def usr1(*_):
        say(f"usr1 rank={rank}")
        (output / f"usr1-{rank}").write_text("")
    signal.signal(signal.SIGUSR1, usr1)
    (output / f"ready-{rank}").write_text("")
    while not (stopped and todo == "save on stop"):
        time.sleep(0.02)
    time.sleep(0.5)
    (output / f"saved-{rank}").write_text(str(stopped))
    raise SystemExit(75)
'''


def job(num_hosts: int, processes_per_host: int) -> dict[str, Any]:
    """A resolved job as launch writes it."""
    world_size = num_hosts * processes_per_host
    return {
        "spec": {
            "name": "tiny",
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "train": [{"path": TRAIN_URI, "format": "jsonl"}],
                "tokenizer": TOKENIZER_URI,
            },
            "training": {"steps": 2, "global_batch_size": 4, "learning_rate": 1e-3},
            "checkpoint": {"destination": "s3://acme-checkpoints/jobs/tiny"},
            "recovery": {"max_restarts": 0},
        },
        "parallelism": {"data_replicate": world_size},
        "num_hosts": num_hosts,
        "processes_per_host": processes_per_host,
        "steps": 2,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 4 // world_size,
        "activation_checkpointing": "none",
        "learning_rate": 1e-3,
    }


def opt_ml(
    root: Path, *, host: str = "algo-1", hosts: Sequence[str] = ("algo-1",), processes_per_host: int = 2
) -> Path:
    """An /opt/ml tree as SageMaker makes it for one host."""
    config = root / "input/config"
    config.mkdir(parents=True)
    resources = {
        "current_host": host,
        "hosts": list(hosts),
        "network_interface_name": "lo",
        "current_instance_type": "ml.p5.4xlarge",
    }
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    channels = {"job": "job", TRAIN_URI: "train-0", TOKENIZER_URI: "tokenizer"}
    for name in channels.values():
        (root / "input/data" / name).mkdir(parents=True)
    (root / "input/data/train-0/part.jsonl").write_text('{"text": "a"}\n')
    (root / "input/data/tokenizer/tokenizer.json").write_text("{}")
    del channels["job"]
    (root / "input/data/job/channels.json").write_text(json.dumps(channels))
    (root / "input/data/job/resolved_job.json").write_text(json.dumps(job(len(hosts), processes_per_host)))
    return root


@contextmanager
def running(tree: Path, behaviour: dict[str, str], **flags: str) -> Iterator[subprocess.Popen[str]]:
    """The entrypoint over `tree`, with the fake trainer."""
    fake = tree / "fake"
    fake.mkdir()
    (fake / "fake_trainer.py").write_text(FAKE_TRAINER)
    (fake / "behaviour.json").write_text(json.dumps(behaviour))
    paths = [flags.pop("PYTHONPATH", ""), str(fake), str(CONTAINER), str(CONTAINER.parent)]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TRAINYARD_OPT_ML": str(tree),
        "TRAINYARD_RENDEZVOUS_PORT": str(free_port()),
        "TRAINYARD_SKIP_EFA_CHECK": "1",
        **flags,
    }
    program = "import sys; from trainer.entrypoint import main; sys.exit(main(module='fake_trainer'))"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(tree: Path, behaviour: dict[str, str], **flags: str) -> tuple[int, str]:
    """Exit code and output of a whole run."""
    with running(tree, behaviour, **flags) as process:
        output, _ = process.communicate(timeout=300)
        return process.returncode, output


def failure(tree: Path) -> list[str]:
    """Lines of output/failure."""
    return (tree / "output/failure").read_text().splitlines()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until `path` is there."""
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, f"{path} did not appear"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_ranks_get_local_paths_and_their_place(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    code, output = run(tree, {})
    assert code == 0, output
    seen = [json.loads((tree / f"output/data/seen-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["environment"]["RANK"] for one in seen] == ["0", "1"]
    assert seen[0]["environment"]["WORLD_SIZE"] == "2"
    assert seen[0]["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert str(tree / "trainyard/scratch") in seen[0]["arguments"]
    data = seen[0]["job"]["spec"]["data"]
    assert data["train"][0]["path"] == str(tree / "input/data/train-0")
    assert data["tokenizer"] == str(tree / "input/data/tokenizer/tokenizer.json")
    assert seen[0]["job"]["spec"]["checkpoint"]["destination"] == "s3://acme-checkpoints/jobs/tiny"
    assert not (tree / "output/failure").exists()
    assert re.search("^step=1 rank=0$", output, re.M)


def test_two_hosts_meet(tmp_path: Path) -> None:
    port = str(free_port())
    addresses = json.dumps({"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"})
    flags = {"TRAINYARD_HOST_ADDRESSES": addresses, "TRAINYARD_RENDEZVOUS_PORT": port}
    hosts = ("algo-1", "algo-2")
    first = opt_ml(tmp_path / "1", host="algo-1", hosts=hosts, processes_per_host=1)
    second = opt_ml(tmp_path / "2", host="algo-2", hosts=hosts, processes_per_host=1)
    with running(second, {}, **flags) as other:
        code, output = run(first, {}, **flags)
        other_output, _ = other.communicate(timeout=300)
    assert (code, other.returncode) == (0, 0), output + other_output
    there = json.loads((second / "output/data/seen-1.json").read_text())["environment"]
    assert (there["RANK"], there["LOCAL_RANK"], there["WORLD_SIZE"]) == ("1", "0", "2")
    assert (there["MASTER_ADDR"], there["MASTER_PORT"]) == ("127.0.0.2", port)


def test_failure_names_rank_and_error_and_survivors_stop(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    code, output = run(tree, {"1": "raise beside rank 0", "0": "save on stop"})
    assert code == 1
    lines = failure(tree)
    assert lines[0] == "rank 1 on algo-1: ValueError: boom second line"
    assert any("Traceback" in line for line in lines[1:])
    survivor = json.loads((tree / "output/data/seen-0.json").read_text())["pid"]
    assert not is_alive(survivor), output


def test_the_cause_is_named_and_not_its_consequence(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    assert run(tree, {"0": "peer loss", "1": "kill"})[0] == 1
    assert failure(tree)[0].startswith("rank 1 on algo-1 was killed by SIGKILL")


def test_what_follows_half_a_line_of_a_killed_rank_begins_a_line(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml", processes_per_host=1)
    code, output = run(tree, {"all": "half a word"})
    assert code == 1
    assert "half a wor" in output.splitlines(), output


def test_a_start_leaves_nothing_where_all_programs_keep_temporary_files(tmp_path: Path) -> None:
    tree, temporary = opt_ml(tmp_path / "ml", processes_per_host=1), tmp_path / "temporary"
    temporary.mkdir()
    assert run(tree, {"all": "bad input"}, TMPDIR=str(temporary))[0] == 2
    assert list(temporary.iterdir()) == []


def test_wrong_input_is_exit_code_2(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml", processes_per_host=1)
    assert run(tree, {"all": "bad input"})[0] == 2
    assert failure(tree)[0] == "rank 0 on algo-1: data.train: no such file or folder"


def test_sigterm_lets_the_ranks_save(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    with running(tree, {"all": "save on stop"}) as process:
        for rank in (0, 1):
            wait_for(tree / f"output/data/ready-{rank}", process)
        process.send_signal(signal.SIGUSR1)
        for rank in (0, 1):
            wait_for(tree / f"output/data/usr1-{rank}", process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 75, output
    assert (tree / "output/resume_me").exists() and not (tree / "output/failure").exists()
    assert {"usr1 rank=0", "usr1 rank=1"} <= set(output.splitlines())
    for rank in (0, 1):
        # Once: torchrun's own SIGTERM would come on top of ours.
        assert len(json.loads((tree / f"output/data/saved-{rank}").read_text())) == 1
    assert "Traceback" not in output


def test_a_save_that_is_asked_for_before_the_ranks_listen_ends_none(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    with running(tree, {"all": "hear a save early"}) as process:
        wait_for(tree / "trainyard", process)
        process.send_signal(signal.SIGUSR1)  # torchrun is being started, or ranks import
        for rank in (0, 1):
            wait_for(tree / f"output/data/ready-{rank}", process)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        (tree / "output/data/go on").write_text("")
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "SIGUSR1" not in output or "nothing new to save" in output


def test_sigterm_before_the_first_step_is_no_failure(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    with running(tree, {"all": "wait"}) as process:
        wait_for(tree / "trainyard/ranks", process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 75, output
    assert "nothing new to save" in output and "step=1" not in output


@pytest.mark.parametrize(("moment", "code"), [("after a step", 1), ("before a step", 75)])
def test_a_peer_lost_as_the_host_is_told_to_stop_is_a_loss_once_steps_were_made(
    moment: str, code: int, tmp_path: Path
) -> None:
    """SageMaker ends all containers when one has ended: the others' last word must not be that nothing was lost."""
    tree = opt_ml(tmp_path / "ml")
    with running(tree, {"all": f"lose a peer {moment}"}) as process:
        for rank in (0, 1):
            wait_for(tree / f"output/data/ready-{rank}", process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output
    assert ("stopped before the first step" in output) == (code == 75)
    assert code == 75 or "it lost another rank: see the other hosts' reason" in failure(tree)[0]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after a step", "before a step"])
def test_a_host_lost_as_this_one_is_told_to_stop_is_what_a_resumer_finds(moment: str, tmp_path: Path) -> None:
    """Before the first step of a start too: every start restores and compiles before it."""
    addresses = json.dumps({"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"})
    flags = {"TRAINYARD_HOST_ADDRESSES": addresses, "TRAINYARD_RENDEZVOUS_PORT": str(free_port())}
    hosts = ("algo-1", "algo-2")
    first, second = (
        opt_ml(tmp_path / host, host=host, hosts=hosts, processes_per_host=1) for host in ("algo-1", "algo-2")
    )
    with (
        running(second, {"all": "wait"}, **flags) as lost,
        running(first, {"all": f"lose a peer {moment}"}, **flags) as process,
    ):
        wait_for(first / "output/data/ready-0", process)
        wait_for(second / "output/data/ready-1", lost)
        lost.kill()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 1 and not (first / "output/resume_me").exists(), output
    told = {"TrainingJobStatus": "Failed", "FailureReason": f"AlgorithmError: {failure(first)[0]}, exit code: 1"}
    assert job_resumer.cause(told) == "a host was lost", told


@pytest.mark.parametrize(("moment", "code"), [("after a step", 1), ("before a step", 75)])
def test_ranks_that_do_not_stop_are_killed_when_the_grace_is_over(moment: str, code: int, tmp_path: Path) -> None:
    """Before the first step there is nothing to lose, and no failure: tokenizing and restoring hear no signal."""
    tree = opt_ml(tmp_path / "ml", processes_per_host=1)
    with running(tree, {"all": f"ignore stop {moment}"}, TRAINYARD_STOP_GRACE_SECONDS="1") as process:
        wait_for(tree / "output/data/ready-0", process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == code
    late = "ranks 0 of algo-1 did not save and exit within 1 s after SIGTERM"
    assert failure(tree)[0] == late if code == 1 else "stopped before the first step, killed 1 s after" in output


def test_a_rank_that_had_failed_before_a_stop_is_not_to_be_resumed(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml")
    behaviour = {"0": "bad input beside rank 1", "1": "ignore stop before a step"}
    with running(tree, behaviour, TRAINYARD_STOP_GRACE_SECONDS="1") as process:
        for name in ("ready-1", "seen-0.json"):
            wait_for(tree / "output/data" / name, process)
        while is_alive(json.loads((tree / "output/data/seen-0.json").read_text())["pid"]):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 2, output
    assert failure(tree)[0] == "rank 0 on algo-1: data.train: no such file or folder"


def test_nothing_outlives_a_killed_entrypoint(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path / "ml", processes_per_host=1)
    with running(tree, {"all": "wait"}) as process:
        wait_for(tree / "output/data/ready-0", process)
        rank = json.loads((tree / "output/data/seen-0.json").read_text())["pid"]
        assert is_alive(rank)
        process.kill()
        process.communicate(timeout=400)
    deadline = time.monotonic() + 240
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(rank)


def test_stacks_that_can_not_be_kept_end_nothing(tmp_path: Path) -> None:
    place = Place("algo-1", ("algo-1",), interface="", instance_type="")
    folders = Folders(tmp_path / "out", tmp_path / "file/data", tmp_path / "work")
    host = HostRun(folders, place, ResolvedJob.model_validate(job(1, 1)), "127.0.0.1", {}, "fake_trainer")
    (tmp_path / "file").touch()  # no folder can be made there: an OSError, as a full disk's
    host._keep({0: "most recent call first"}, {0: {"record": {}}})
    assert not (tmp_path / "file/data/stacks").exists()


def test_nccl_tells_of_its_network_where_the_job_asks_for_it(tmp_path: Path) -> None:
    place = Place("algo-1", ("algo-1",), interface="", instance_type="")
    folders = Folders(tmp_path / "out", tmp_path / "data", tmp_path / "work")

    def told(settings: dict[str, str], **preflight: Any) -> str | None:
        content = job(1, 1)
        content["spec"]["preflight"] = preflight
        host = HostRun(folders, place, ResolvedJob.model_validate(content), "127.0.0.1", settings, "fake_trainer")
        return host._environment().get("NCCL_DEBUG")

    assert (told({}), told({}, nccl_log=True)) == (None, "INFO")
    assert told({"NCCL_DEBUG": "TRACE"}, nccl_log=True) == "TRACE", "who runs the image decides last"


@pytest.mark.parametrize("moment", ["before", "removing"])
def test_a_signal_at_any_moment_of_a_start_is_left_for_the_ranks(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("algo-1", ("algo-1",), interface="", instance_type="")
    folders = Folders(tmp_path / "out", tmp_path / "data", tmp_path / "work")
    host = HostRun(folders, place, ResolvedJob.model_validate(job(1, 1)), "127.0.0.1", {}, "fake_trainer")
    seen = []

    def stop() -> None:
        host._on_signal(signal.SIGTERM, None)

    def rmtree(path: Path, **_: object) -> None:
        honest_rmtree(path, ignore_errors=True)
        if moment == "removing":
            stop()
            honest_rmtree(path)  # the handler ran in the middle of it

    honest_rmtree = shutil.rmtree
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: seen.append((tmp_path / "work/ranks/stop").exists()))
    if moment == "before":
        stop()
    host._start()
    assert seen == [True]


def test_a_broken_torch_is_reported_as_such(tmp_path: Path) -> None:
    broken = tmp_path / "broken/torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    tree = opt_ml(tmp_path / "ml", processes_per_host=1)
    assert run(tree, {}, PYTHONPATH=str(broken.parent))[0] == 1
    assert failure(tree)[0] == (
        "torch can't be imported on algo-1: ImportError: libtorch_cpu.so: cannot open shared object file"
    )


def test_the_entrypoint_imports_no_torch() -> None:
    program = "import sys, trainer.entrypoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_hosts_are_ordered_as_numbers(tmp_path: Path) -> None:
    hosts = ("algo-1", "algo-10", "algo-2")
    place = entrypoint.read_place(opt_ml(tmp_path, host="algo-10", hosts=hosts))
    assert place.hosts == ("algo-1", "algo-2", "algo-10")
    assert place.index == 2


def test_fewer_hosts_than_planned_are_laid_out_anew(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path)
    planned = job(2, 2)
    del planned["parallelism"]
    planned["parallelism"] = {"data_replicate": 4}
    (tree / "input/data/job/resolved_job.json").write_text(json.dumps(planned))
    here = entrypoint.read_job(tree, entrypoint.read_place(tree), {})
    assert isinstance(here, ResolvedJob)
    assert here.world_size == 2
    assert here.gradient_accumulation_steps * here.micro_batch_size == 2


def test_class_names_get_their_channel(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path)
    planned = job(1, 1)
    planned["spec"] |= {"task": "image_classification", "images": {"class_names": "s3://data/names.txt"}}
    planned["spec"]["data"] = {"train": [{"path": TRAIN_URI, "format": "webdataset"}]}
    (tree / "input/data/job/resolved_job.json").write_text(json.dumps(planned))
    channels = json.loads((tree / "input/data/job/channels.json").read_text())
    (tree / "input/data/job/channels.json").write_text(json.dumps(channels | {"s3://data/names.txt": "class-names"}))
    (tree / "input/data/class-names").mkdir()
    (tree / "input/data/class-names/names.txt").write_text("cat")
    here = entrypoint.read_job(tree, entrypoint.read_place(tree), {"TRAINYARD_PROCESSES_PER_HOST": "1"})
    assert here.spec.images is not None
    assert here.spec.images.class_names == str(tree / "input/data/class-names/names.txt")


def test_a_folder_in_an_input_that_has_its_name_is_not_all_of_it(tmp_path: Path) -> None:
    """s3://data/train is a folder: data sets of the Hub have their files in data/, beside others."""
    tree = opt_ml(tmp_path)
    (tree / "input/data/train-0" / TRAIN_URI.rsplit("/", 1)[1]).mkdir()
    here = entrypoint.read_job(tree, entrypoint.read_place(tree), {"TRAINYARD_PROCESSES_PER_HOST": "1"})
    assert here.spec.data.train[0].path == str(tree / "input/data/train-0")


def test_streamed_data_keeps_its_place_and_the_chat_template_gets_its_channel(tmp_path: Path) -> None:
    tree = opt_ml(tmp_path)
    planned = job(1, 1)
    planned["spec"]["data"]["train"] = [{"path": "s3://data/chats", "format": "jsonl"}]
    planned["spec"]["data"] |= {"streaming": True, "chat_template": "s3://data/chat.jinja"}
    (tree / "input/data/job/resolved_job.json").write_text(json.dumps(planned))
    channels = json.loads((tree / "input/data/job/channels.json").read_text())
    (tree / "input/data/job/channels.json").write_text(json.dumps(channels | {"s3://data/chat.jinja": "chat-template"}))
    (tree / "input/data/chat-template").mkdir()
    (tree / "input/data/chat-template/chat.jinja").write_text("{{ messages }}")
    here = entrypoint.read_job(tree, entrypoint.read_place(tree), {"TRAINYARD_PROCESSES_PER_HOST": "1"})
    assert here.spec.data.train[0].path == "s3://data/chats"
    assert here.spec.data.chat_template == str(tree / "input/data/chat-template/chat.jinja")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda tree: (tree / "input/data/job/resolved_job.json").unlink(), "resolved_job.json: no such file"),
        (lambda tree: (tree / "input/data/job/channels.json").write_text("{}"), "no input channel brings it"),
        (lambda tree: (tree / "input/config/resourceconfig.json").write_text("["), "can't be read as JSON"),
        (lambda tree: (tree / "input/config/resourceconfig.json").write_text("{}"), "has no usable 'hosts'"),
    ],
)
def test_a_wrong_tree_is_one_line_and_exit_code_2(tmp_path: Path, break_it: Any, message: str) -> None:
    tree = opt_ml(tmp_path)
    break_it(tree)
    assert entrypoint.main({"TRAINYARD_OPT_ML": str(tree)}) == 2
    (line,) = failure(tree)
    assert message in line


def test_missing_efa_devices_fail_closed(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match=r"ml\.p5\.48xlarge has 32 interfaces, .* shows 1"):
        (tmp_path / "rdmap0").mkdir()
        entrypoint.check_efa("ml.p5.48xlarge", tmp_path)
    for number in range(1, 32):
        (tmp_path / f"rdmap{number}").mkdir()
    entrypoint.check_efa("ml.p5.48xlarge", tmp_path)
    with pytest.raises(InputError, match="has no EFA"):
        entrypoint.check_efa("ml.g5.xlarge", tmp_path)


def test_a_host_name_may_appear_late(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = entrypoint.Place("algo-2", ("algo-1", "algo-2"), "eth0", "ml.p5.48xlarge")
    answers = [entrypoint.socket.gaierror("not known"), [(2, 1, 6, "", ("10.0.0.7", 0))]]

    def answer(*_: Any, **__: Any) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(entrypoint.socket, "getaddrinfo", answer)
    assert entrypoint.first_address(place, {}) == "10.0.0.7"
    assert "algo-1 has no address yet" in capsys.readouterr().out
    answers.append(entrypoint.socket.gaierror("not known"))
    with pytest.raises(JobFailedError, match="host algo-1 has no address after 0 s"):
        entrypoint.first_address(place, {}, patience_seconds=0)
