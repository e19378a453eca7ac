"""The bad inputs that people really give: one line that says what, where and how to mend it, and the right code."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_testing import environment_content, job_content

from trainyard.cli.app import run
from trainyard.cli.output import write_page
from trainyard.errors import InputError
from trainyard.launch.checks import RunningJob
from trainyard.launch.record import S3RecordStore
from trainyard.launch.sagemaker_backend import SageMakerBackend
from trainyard.launch.session import Account, unwritable

TINY = Path(__file__).resolve().parents[2] / "jobs" / "tiny.yaml"
WriteJob = Callable[..., str]
Refusal = Callable[[list[str], int], str]


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees this machine's emulator or jobs."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def write_job(tmp_path: Path) -> WriteJob:
    """job_content() with changes, as a file."""

    def write(**changes: Any) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump({**job_content(), **changes}), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command that must be refused with a code; its one line."""

    def refused(arguments: list[str], code: int) -> str:
        assert run(arguments) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "Traceback" not in printed.err
        # Progress may come before it; the error itself is one line, the last.
        lines = [line for line in printed.err.splitlines() if line.startswith("trainyard: ")]
        assert len(lines) == 1 and printed.err.rstrip().endswith(lines[0])
        return lines[0]

    return refused


def test_an_unknown_key(refusal: Refusal, write_job: WriteJob, environment_path: Path) -> None:
    line = refusal(["launch", write_job(trainning={"steps": 3}), "-e", str(environment_path)], 2)
    assert "job.yaml: trainning: unknown key, did you mean 'training'?" in line
    assert "trainning" in refusal(["plan", write_job(trainning={"steps": 3})], 2)


def test_an_option_that_takes_certain_words_alone(refusal: Refusal) -> None:
    line = refusal(["cost", "--by", "nothing"], 2)
    assert "Invalid value for '--by': 'nothing' is not one of 'day', 'tenant', 'job'" in line
    assert line.endswith("(see trainyard cost --help)")


def test_a_model_whose_name_no_folder_can_have(refusal: Refusal) -> None:
    line = refusal(["plan", "jobs/llama-7b.yaml", "--set", f"model.source={'x' * 5000}"], 2)
    assert "its sizes aren't known here; name a folder with config.json" in line


def test_a_model_that_nobody_knows_is_told_close_names_alone(refusal: Refusal) -> None:
    for source, such in (("foo/bar", "such as llama-3.1-8b"), ("meta-llama/Lama-3.1-8B", "such as llama-3.1-8b, ")):
        line = refusal(["plan", "jobs/llama-7b.yaml", "--set", f"model.source={source}"], 2)
        assert such in line and len(line) < 300, line


def test_a_missing_job_file(refusal: Refusal) -> None:
    assert "nowhere.yaml: no such file" in refusal(["plan", "nowhere.yaml"], 2)


@pytest.mark.parametrize(
    "verb",
    [
        ["launch", "jobs/tiny.yaml", "--backend", "local"],
        ["sweep", "jobs/tiny.yaml", "--over", "training.seed=1,2", "--backend", "local"],
        ["emulator", "start"],
    ],
    ids=lambda verb: verb[0],
)
def test_a_state_folder_that_takes_nothing(
    refusal: Refusal, verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights don't stop root, who runs tests here and there: a file in the folder's place stops everybody."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "file" / "state"))
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    line = refusal(verb, 2)
    assert f"the state folder {tmp_path}/file/state: can't be written (Not a directory)" in line
    assert "TRAINYARD_STATE_DIR" in line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        # A write names no file, and may be one to the output.
        (OSError(errno.ENOSPC, "full"), "a disk is full (No space left on device): the state folder's, STATE, or the"),
        (PermissionError(errno.EACCES, "no", "STATE/jobs/x"), "the state folder STATE: can't be written (Perm"),
        (PermissionError(errno.EACCES, "no", "/elsewhere"), None),
        (FileNotFoundError(errno.ENOENT, "gone", "STATE/jobs/x"), None),
    ],
)
def test_what_no_state_folder_is_to_blame_for_stays_a_bug(error: OSError, told: str | None, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    (tmp_path / "state").mkdir()
    if isinstance(error.filename, str):
        error.filename = error.filename.replace("STATE", state)
    found = unwritable(error)
    assert found is None if told is None else str(found).startswith(told.replace("STATE", state))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_full_disk_may_be_the_outputs() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trainyard", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and "trainyard: a disk is full" in done.stderr and "output goes to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("closed", "verb", "code", "told"),
    [
        (">&-", "plan jobs/tiny.yaml", 0, ""),
        ("<&- >&- 2>&-", "plan jobs/tiny.yaml", 0, ""),
        ("<&- 2>&-", "--version", 0, "trainyard "),
        (">&-", "plan nowhere.yaml", 2, "trainyard: nowhere.yaml: no such file"),
    ],
)
def test_streams_that_are_closed_lead_nowhere(closed: str, verb: str, code: int, told: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m trainyard {verb} {closed}', sys.executable],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0)
    assert (done.stdout + done.stderr).startswith(told)
    assert told or not done.stdout + done.stderr


@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_whoever_ends_a_verb_ends_it_as_ctrl_c_does(number: signal.Signals, interrupt: signal.Handlers) -> None:
    if (number, interrupt) == (signal.SIGINT, signal.SIG_IGN):
        return  # then nobody asks it to end
    # Whoever runs the tests with nohup has a lost terminal ignored, and so would the verb, as it should.
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += f"signal.signal(signal.SIGINT, signal.{interrupt.name})\n"
    code += "os.execv(sys.executable, [sys.executable, '-m', 'trainyard', 'predict', '--jsonl'])"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("{}\n")
    process.stdin.flush()
    assert "error" in process.stdout.readline()  # it is at work, and waits for the next line
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("Traceback")) == (130, 0), errors


def test_a_page_that_a_full_disk_cuts_short_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_text", cut_short)
    (tmp_path / "old.html").write_bytes(b"an earlier one")
    for name in ("new.html", "old.html"):
        with pytest.raises(InputError, match=rf"^--html .*/{name}: can't be written \(full\); name"):
            write_page("--html", tmp_path / name, "<!doctype html>")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old.html", b"an earlier one")]


def test_a_page_keeps_the_rights_and_the_link_of_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, link = tmp_path / "kept.html", tmp_path / "link.html"
    kept.write_text("an earlier one")
    kept.chmod(0o640)
    link.symlink_to(kept)
    write_page("--html", link, "a page")
    assert (link.is_symlink(), kept.read_text(), kept.stat().st_mode & 0o777) == (True, "a page", 0o640)
    with monkeypatch.context() as folder:
        folder.setattr(os, "access", lambda *_: False)  # for root every folder is one that it may write to
        before = kept.stat().st_ino
        write_page("--html", kept, "another page")
        assert (kept.read_text(), kept.stat().st_ino) == ("another page", before)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_page("--html", tmp_path / "pipe", "a page")
    assert (os.read(reader, 100), (tmp_path / "pipe").is_fifo()) == (b"a page", True)
    os.close(reader)


def test_a_page_goes_into_what_is_open_already_and_links_that_go_round_are_one_line(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    write_page("--html", Path(f"/dev/fd/{writer}"), "a page")
    assert os.read(reader, 100) == b"a page"
    os.close(reader)
    os.close(writer)
    with (tmp_path / "open").open("w+") as file:
        write_page("--html", Path(f"/dev/fd/{file.fileno()}"), "a page")
        assert os.path.samestat(os.fstat(file.fileno()), (tmp_path / "open").stat()), "no other file in its place"
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(InputError, match=r"--html .*round: can't be written"):
        write_page("--html", tmp_path / "round", "a page")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["open", "round"]


_HOME = "only a shell takes ~ for a home; write the whole path"
_ADDRESS = "must be a path of this machine, and no address"


@pytest.mark.parametrize(
    "words",
    [
        ["report", "local-tiny-20260131120000-1a2b", "--out=PLACE"],
        ["plan", "no.yaml", "--html=PLACE"],
        ["isolation", "none.yaml", "--html=PLACE"],
        ["canary", str(TINY), "--set", "training.steps=9", "--backend", "local", "--evidence=PLACE"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    ("place", "shown", "why"),
    [
        ("~/x", "~/x", _HOME),
        ("~someone/x", "~someone/x", _HOME),
        ("gs://bucket/x", "gs:/bucket/x", _ADDRESS),
        ("gs:x", "gs:x", _ADDRESS),
        ("s3://bucket/x", "s3:/bucket/x", _ADDRESS),
        ("s3://", "s3:", _ADDRESS),
        ("hdfs://host/x", "hdfs:/host/x", _ADDRESS),
        (" ", " ", "names nothing"),
    ],
)
def test_nothing_is_made_of_an_address_or_a_home_where_a_path_is_meant(
    refusal: Refusal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    place: str,
    shown: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal([word.replace("PLACE", place) for word in words], 2)
    option = words[-1].partition("=")[0]
    assert line == " ".join(f"trainyard: {option} {shown}: {why}".split())
    assert not any(tmp_path.iterdir())


def test_a_page_goes_to_no_folder(refusal: Refusal, tmp_path: Path) -> None:
    said = refusal(["plan", "no.yaml", f"--html={tmp_path}"], 2)
    assert said == f"trainyard: --html {tmp_path}: is a folder; name a file in it"


@pytest.mark.parametrize(("place", "why"), [("~/state", _HOME), ("s3://bucket/state", _ADDRESS)])
def test_the_state_folder_is_one_of_this_machine(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINYARD_STATE_DIR", place)
    for words in (["jobs"], ["launch", str(TINY), "--backend", "local"], ["prices", "refresh"], ["emulator", "status"]):
        assert refusal(words, 2) == f"trainyard: TRAINYARD_STATE_DIR {place}: {why}"
    for command in ("trainyard.operate.quickstart", "trainyard.operate.image"):
        done = subprocess.run(
            [sys.executable, "-m", command, "build"][: 3 + command.endswith("image")], text=True, capture_output=True
        )
        assert (done.returncode, done.stderr) == (2, f"trainyard: TRAINYARD_STATE_DIR {place}: {why}\n")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("state", ["file/state", "link/state"])
def test_a_state_folder_that_is_named_otherwise_than_it_is_opened(
    refusal: Refusal, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    monkeypatch.setenv("TRAINYARD_STATE_DIR", state)
    monkeypatch.chdir(tmp_path)
    line = refusal(["emulator", "start"], 2)
    assert f"the state folder {state}: can't be written (Not a directory)" in line


def test_a_malformed_override(refusal: Refusal, write_job: WriteJob) -> None:
    assert "must look like section.key=value" in refusal(["plan", write_job(), "--set", "training.steps"], 2)


def test_no_tenant(refusal: Refusal, write_job: WriteJob, environment_path: Path) -> None:
    line = refusal(["launch", write_job(tenant=None), "-e", str(environment_path)], 2)
    assert "tenant is missing; environment test has: acme, globex" in line


def test_an_unknown_tenant(refusal: Refusal, write_job: WriteJob, environment_path: Path) -> None:
    line = refusal(["launch", write_job(tenant="initech"), "-e", str(environment_path)], 2)
    assert "tenant 'initech' is not in environment test, which has: acme, globex" in line


def test_a_tenant_that_is_not_deployed(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account
) -> None:
    line = refusal(["launch", write_job(tenant="globex"), "-e", str(environment_path)], 3)
    assert "/trainyard/test/globex/contract doesn't exist; deploy the stacks: trainyard deploy" in line


def test_an_unknown_environment(refusal: Refusal, write_job: WriteJob) -> None:
    line = refusal(["launch", write_job(), "-e", "moon"], 2)
    assert "no such environment" in line and "local" in line


def test_more_machines_than_the_quota(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account
) -> None:
    many = {**job_content()["compute"], "instance_count": 16}
    line = refusal(["launch", write_job(compute=many), "-e", str(environment_path), "--force"], 2)
    assert "compute.instance_count 16: over the quota of tenant acme, which is 4 x ml.p5.4xlarge" in line


def test_a_bucket_that_is_not_there(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account
) -> None:
    data = {**job_content()["data"], "train": [{"path": "s3://no-such-bucket-anywhere/train", "format": "jsonl"}]}
    line = refusal(["launch", write_job(data=data), "-e", str(environment_path)], 3)
    assert "there is no bucket no-such-bucket-anywhere; the tenant's buckets are acme-data, acme-checkpoints" in line


def test_a_path_that_is_not_there(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account
) -> None:
    data = {**job_content()["data"], "train": [{"path": "tenant://sets/typo", "format": "jsonl"}]}
    assert "s3://acme-data/sets/typo: there is nothing there" in refusal(
        ["launch", write_job(data=data), "-e", str(environment_path)], 3
    )


def test_the_wrong_account(refusal: Refusal, write_job: WriteJob, tmp_path: Path, aws: Account) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**environment_content(), "account": "999999999999"}), encoding="utf-8")
    line = refusal(["launch", write_job(), "-e", str(other)], 3)
    assert "wrong AWS account: the credentials belong to 123456789012, environment test is account 999999999999" in line
    assert "AWS_PROFILE" in line


def test_no_credentials(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "no AWS credentials found" in refusal(["launch", write_job(), "-e", str(environment_path)], 3)
    # Before synthesis, which takes up to a minute: no CDK is there to do it.
    monkeypatch.setattr("trainyard.operate.deploy.prepare", lambda *_: pytest.fail("it synthesizes first"))
    assert "no AWS credentials found" in refusal(["deploy", str(environment_path)], 3)


def test_an_unknown_profile(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, aws: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    assert "no-such-profile" in refusal(["launch", write_job(), "-e", str(environment_path)], 3)


def test_no_emulator_for_an_emulated_environment(refusal: Refusal, write_job: WriteJob, tmp_path: Path) -> None:
    emulated = tmp_path / "emulated.yaml"
    emulated.write_text(yaml.safe_dump({**environment_content(), "emulated": True}), encoding="utf-8")
    line = refusal(["launch", write_job(), "-e", str(emulated)], 3)
    assert "no emulator is running; start it with `scripts/quickstart`" in line


def test_a_tenant_too_long_for_a_jobs_name(refusal: Refusal, write_job: WriteJob) -> None:
    line = refusal(["launch", write_job(), "--backend", "local", "--set", f"tenant={'a' * 60}"], 2)
    assert "job.yaml: tenant: must be 2 to 20 " in line


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_number_that_is_none(refusal: Refusal, write_job: WriteJob, value: str) -> None:
    assert "training.learning_rate: " in refusal(["plan", write_job(), "--set", f"training.learning_rate={value}"], 2)
    assert "budget.max_usd: " in refusal(["plan", write_job(), "--set", f"budget.max_usd={value}"], 2)


def test_a_queue_that_is_full(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [RunningJob("acme-other", "ml.p5.4xlarge", 3)]
    monkeypatch.setattr(SageMakerBackend, "running", lambda *_, **__: held)
    line = refusal(["launch", write_job(), "-e", str(environment_path), "--force"], 2)
    assert "3 of the 4 instances of queue gpu are held by acme-other (3); wait until one ends" in line
    assert S3RecordStore(deployed.client("s3"), "acme-data").job_ids() == [], "nothing was recorded"


def test_a_job_that_is_refused_once_it_is_recorded_says_that_it_is(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broker alone knows it refuses then: `jobs` listed a job that nobody had heard of."""

    def submit(*_: object) -> None:
        raise InputError("budget of tenant acme: nothing is left (tenant acme's broker)")

    monkeypatch.setattr(SageMakerBackend, "submit", submit)
    line = refusal(["launch", write_job(), "-e", str(environment_path)], 2)
    (job_id,) = S3RecordStore(deployed.client("s3"), "acme-data").job_ids()
    told = f"recorded and not submitted: `trainyard resume {job_id} --environment {environment_path}` submits it"
    assert "budget of tenant acme: nothing is left" in line and line.endswith(told)


def test_an_occupied_port(refusal: Refusal) -> None:
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = occupant.getsockname()[1]
        assert str(port) in refusal(["emulator", "start", "--port", str(port)], 2)


def test_a_job_that_does_not_exist(refusal: Refusal, environment_path: Path, deployed: Account) -> None:
    for verb in ("status", "logs", "stop", "resume", "checkpoints"):
        line = refusal([verb, "acme-none-20260131120000-1a2b", "-e", str(environment_path)], 2)
        assert "there is no such job in s3://acme-data/jobs/" in line
        assert "must look like" in refusal([verb, "Not_A_Job", "-e", str(environment_path)], 2)
    line = refusal(["status", "initech-none-20260131120000-1a2b", "-e", str(environment_path)], 2)
    assert "begins with no tenant of environment test (acme, globex)" in line


def test_slurm_where_there_is_none(
    refusal: Refusal, write_job: WriteJob, environment_path: Path, deployed: Account
) -> None:
    moved = ["launch", write_job(), "--backend", "slurm"]
    assert "there is no `sbatch` on the PATH here" in refusal(moved, 2)
    line = refusal([*moved, "--set", "compute.queue=none", "-e", str(environment_path)], 2)
    assert "tenant acme has no cluster in environment test" in line


def test_kubernetes_and_ray_where_there_are_none(
    refusal: Refusal, write_job: WriteJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    own = ["--set", "compute.spot=false", "--set", "checkpoint.destination=s3://results/x"]
    image = f"compute.kubernetes.image=registry/trainer@sha256:{'ab' * 32}"
    moved = ["launch", write_job(), *own, "--backend", "kubernetes"]
    assert "compute.kubernetes.image: is missing" in refusal(moved, 2)
    assert "there is no `kubectl` on the PATH here" in refusal([*moved, "--set", image], 2)
    moved = ["launch", write_job(), *own, "--backend", "ray"]
    assert "tenant://sets/train is not on this machine" in refusal(moved, 2)


def test_data_elsewhere_for_a_local_job(refusal: Refusal, write_job: WriteJob) -> None:
    line = refusal(["launch", write_job(), "--backend", "local"], 2)
    assert "data.train.0.path: tenant://sets/train is not on this machine" in line
