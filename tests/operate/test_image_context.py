"""What goes into the image: the lock's wheels for the base's Python, and our sources, the same bytes every time."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trainyard.errors import InputError, JobFailedError
from trainyard.operate.image import build, context
from trainyard.operate.image.build import Base, Options
from trainyard.operate.image.context import Context, Target

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "training_container"
PINNED = "public.ecr.aws/x/base@sha256:" + "ab" * 32


def test_the_lock_is_read_for_the_bases_python_not_for_this_one() -> None:
    lock = CONTAINER / "requirements.txt"
    old, new = (
        dict(pin.split("==") for pin in context.locked(lock, Target("cuda", python))) for python in ("3.11", "3.12")
    )
    assert old["networkx"] != new["networkx"], "the lock has one for each"
    assert "colorama" not in new, "for Windows alone"
    assert "torch" not in new, "chosen by the accelerator"
    assert {"transformers", "deepspeed", "boto3", "pydantic"} <= set(new)


def test_a_lock_that_pins_nothing_is_refused(tmp_path: Path) -> None:
    for line, why in (("numpy>=2", "not pinned"), ("numpy", "not pinned"), ("@@", "scripts/lock")):
        (tmp_path / "requirements.txt").write_text(f"# a lock\n{line}\n")
        with pytest.raises(InputError, match=f"requirements.txt:2: .*{why}"):
            context.locked(tmp_path / "requirements.txt", Target("cpu", "3.11"))


def checkout(folder: Path, age_seconds: int) -> Path:
    """A copy of what the wheel is made of, elsewhere, with other dates and rights."""
    for name in ("training_container/trainer", "trainyard", "docs"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "emulator", "isolation")
        )
    for path in folder.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o600)
        os.utime(path, (age_seconds, age_seconds))
    return folder


@pytest.mark.slow
def test_the_same_sources_make_the_same_wheel_and_other_rooms_change_nothing(tmp_path: Path) -> None:
    wheels = []
    for number in range(2):
        root = checkout(tmp_path / f"checkout-{number}", 1_000_000_000 + number)
        if number:
            (root / "docs/trainer.md").write_text("changed")
            (root / "trainyard/cli/app.py").write_text("changed")
        (root / "dist").mkdir()
        wheels.append(context.build_wheel(root, root / "dist", epoch=context.EPOCH))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = set(wheel.namelist())
        assert {info.date_time for info in wheel.infolist()} == {(2026, 1, 1, 0, 0, 0)}
        scripts = next(name for name in names if name.endswith("entry_points.txt"))
        assert "train = trainer.container:main" in wheel.read(scripts).decode()
    staged = tmp_path / "staged"
    context.stage(ROOT, staged)
    sources = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert sources == {name for name in names if ".dist-info/" not in name}
    assert not [name for name in names if name.startswith(("trainyard/cli", "trainyard/launch"))]


def test_the_wheel_has_all_that_the_trainer_imports(tmp_path: Path) -> None:
    """Every module of ours in it can be found without the checkout."""
    context.stage(ROOT, tmp_path / "staged")
    code = (
        "import ast, importlib.util, pathlib, sys\n"
        "root = pathlib.Path(sys.argv[1]); sys.path.insert(0, str(root))\n"
        "missing = set()\n"
        "for path in root.rglob('*.py'):\n"
        "    for node in ast.walk(ast.parse(path.read_text())):\n"
        "        names = [node.module] if isinstance(node, ast.ImportFrom) else "
        "[a.name for a in node.names] if isinstance(node, ast.Import) else []\n"
        "        for name in names:\n"
        "            if name.split('.')[0] in ('trainyard', 'trainer'):\n"
        "                file = root / name.replace('.', '/')\n"
        "                if not (file.is_dir() or file.with_suffix('.py').exists()): missing.add(name)\n"
        "print(sorted(missing))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path / "staged")], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_digest_is_of_names_and_bytes_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    os.utime(tmp_path / "b/file", (1, 1))

    def digest(name: str) -> str:
        return context.digest_of((tmp_path / name).iterdir(), tmp_path / name)

    assert digest("a") == digest("b")
    (tmp_path / "b/file").rename(tmp_path / "b/other")
    assert digest("a") != digest("b")
    (tmp_path / "b/other").write_text("y")
    (tmp_path / "b/other").rename(tmp_path / "b/file")
    assert digest("a") != digest("b")


def test_every_wheel_but_pips_is_named_with_its_hash(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in (
        "pip-25.3-py3-none-any.whl",
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a_b-1.0-py3-none-any.whl",
        "trainyard_trainer-0.1.0-py3-none-any.whl",
    ):
        (wheels / name).write_text(name)
    context.write_requirements(tmp_path)
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["a-b==1.0", "torch==2.13.0+cpu"]
    assert (tmp_path / "trainer.txt").read_text().startswith("trainyard-trainer==0.1.0 --hash=sha256:")
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", line) for line in lines)


def options(**changes: object) -> Options:
    """Of a build for production."""
    given: dict[str, object] = {
        "base": PINNED,
        "accelerator": "cuda",
        "python": "3.12",
        "efa": "base",
        "output": Path("layout"),
        "work": Path("work"),
    }
    return Options(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": "public.ecr.aws/x/base:latest"}, "pinned by its digest"),
        ({"base": "debian"}, "must be `local`, or"),
        ({"python": "3.10"}, "must be 3.11 or newer"),
        ({"python": "3"}, "must be 3.11 or newer"),
        ({"base": "local", "accelerator": "cpu", "python": "3.12", "efa": "none"}, "whose Python is 3.11"),
        ({"base": "local", "python": "3.11"}, "Debian alone, without EFA"),
        ({"efa": "none"}, "needs EFA"),
        ({"efa": "installer"}, "go together"),
        ({"efa_installer": Path("x")}, "go together"),
        ({"output": Path("~/layout")}, "--output ~/layout: only a shell takes ~ for a home"),
        ({"work": Path("s3://bucket/work")}, "--work s3:/bucket/work: must be a path of this machine"),
    ],
)
def test_what_cant_be_built_is_refused_first(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        build.check_options(options(**changes))
    assert "\n" not in str(refused.value)


def test_without_the_tools_one_line_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="needs buildah and mmdebstrap; run: scripts/setup --with image"):
        build.check_options(options(base="local", accelerator="cpu", python="3.11", efa="none"))


def arguments(given: Options, target: Target, base: Base) -> dict[str, str]:
    words = build.build_arguments(
        given, Context(Path("dist"), "sha256:" + "0" * 64, "sha256:" + "1" * 64), target, base
    )
    return dict(words[index + 1].split("=", 1) for index, word in enumerate(words) if word == "--build-arg")


def test_local_and_production_differ_in_build_arguments_alone() -> None:
    """The same arguments, which the Dockerfile declares all, and no other word of the command but where the base is."""
    here = options(base="local", accelerator="cpu", python="3.11", efa="none")
    local = arguments(
        here, Target("cpu", "3.11"), Base("localhost/trainyard-base:bookworm", "localhost/trainyard-base", "sha256:1")
    )
    production = arguments(options(), Target("cuda", "3.12"), build.named_base(PINNED))
    assert set(local) == set(production)
    declared = set(re.findall(r"^ARG (\w+)", (CONTAINER / "Dockerfile").read_text(), re.MULTILINE))
    assert declared == set(local)
    assert production["BASE_IMAGE"] == PINNED and production["BASE_DIGEST"] == PINNED.partition("@")[2]


def test_hadolint_has_nothing_against_the_dockerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, CONTAINER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_folder_that_is_no_layout_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "photo.jpg").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("images", "file"):
        with pytest.raises(InputError, match=f"--output .*{name}: is there and no OCI layout"):
            build.check_options(options(output=tmp_path / name))
    (tmp_path / "images" / "oci-layout").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("images", "empty", "none"):
        try:
            build.check_options(options(output=tmp_path / name))
        except InputError as error:
            assert "--output" not in str(error), "what else is missing here (buildah, root) is no matter"


def test_an_earlier_torchs_cuda_wheels_go_before_the_new_ones_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in (
        "torch-2.12.0-cp312-cp312-linux_x86_64",
        "nvidia_cudnn_cu13-9.9.1-py3-none-any",
        "six-1.0-py3-none-any",
    ):
        (wheels / f"{name}.whl").write_text(name)

    def pip(arguments: list[str], *, epoch: int) -> None:
        for name in ("torch-2.13.0-cp312-cp312-linux_x86_64", "nvidia_cudnn_cu13-9.13.0-py3-none-any"):
            (wheels / f"{name}.whl").write_text(name)

    monkeypatch.setattr(context, "_pip", pip)
    context.fetch_wheels(["six==1.0", "torch==2.13.0"], wheels, Target("cuda", "3.12"), epoch=0)
    context.write_requirements(tmp_path)
    pinned = (tmp_path / "requirements.txt").read_text()
    assert re.findall(r"^\S+", pinned, re.MULTILINE) == ["nvidia-cudnn-cu13==9.13.0", "six==1.0", "torch==2.13.0"]
    (wheels / "nvidia_cudnn_cu13-9.9.1-py3-none-any.whl").write_text("of another torch")
    with pytest.raises(InputError, match="has two wheels of nvidia-cudnn-cu13"):
        context.write_requirements(tmp_path)


def wheel(folder: Path, name: str, version: str, tags: str, needs: str = "") -> None:
    """One that pip takes, and that holds nothing."""
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tags}.whl", "w") as file:
        file.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
        file.writestr(f"{name}-{version}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tags}\n")
        file.writestr(f"{name}-{version}.dist-info/RECORD", "")


@pytest.mark.parametrize(
    ("tags", "is_kept"),
    [("cp312-abi3", False), ("cp311-abi3", True), ("cp310-abi3", True), ("cp312-cp312", False), ("py3-none", True)],
)
def test_a_wheel_of_a_build_for_a_newer_python_is_not_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: str, is_kept: bool
) -> None:
    """The stable ABI goes on with later Pythons, and not with earlier ones: pip would refuse it inside the image."""
    name = f"six-1.0-{tags}-manylinux_2_17_x86_64.whl"
    (tmp_path / name).write_text("of a build for 3.12")

    def pip(arguments: list[str], *, epoch: int) -> None:
        (tmp_path / "six-1.0-cp311-cp311-manylinux_2_17_x86_64.whl").write_text("new")

    monkeypatch.setattr(context, "_pip", pip)
    context.fetch_wheels(["six==1.0"], tmp_path, Target("cpu", "3.11"), epoch=0)
    assert (tmp_path / name).exists() is is_kept and len(list(tmp_path.iterdir())) == 1


def test_cudas_torch_is_taken_though_there_is_one_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip holds `2.13.0+cpu` for a better 2.13.0: from a local build before, or from an index that has both. With it
    come its CUDA libraries, whatever glibc they name."""
    tags = "cp312-cp312-manylinux_2_28_x86_64"
    for folder in (tmp_path / "wheels", tmp_path / "index"):
        wheel(folder, "torch", "2.13.0+cpu", tags)
    wheel(tmp_path / "index", "torch", "2.13.0", tags, "Requires-Dist: nvidia-nccl-cu13==2.29.7\n")
    wheel(tmp_path / "index", "nvidia_nccl_cu13", "2.29.7", "py3-none-manylinux_2_18_x86_64")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    context.fetch_wheels(["torch==2.13.0"], tmp_path / "wheels", Target("cuda", "3.12"), epoch=0)
    fetched = {path.name for path in (tmp_path / "wheels").iterdir()}
    assert fetched == {f"torch-2.13.0-{tags}.whl", "nvidia_nccl_cu13-2.29.7-py3-none-manylinux_2_18_x86_64.whl"}


def test_a_pin_that_pip_brought_no_wheel_of_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_pip", lambda arguments, *, epoch: None)
    with pytest.raises(JobFailedError, match=r"no wheel of torch==2\.13\.0; build with --fresh"):
        context.fetch_wheels(["torch==2.13.0"], tmp_path, Target("cuda", "3.12"), epoch=0)
