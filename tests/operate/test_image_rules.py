"""The rules of images: a good one keeps them all, each bad one is found by the rule that is meant and by no other."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from image_testing import PINS, Draft, Entry, good, python_package

from trainyard.errors import InputError
from trainyard.operate.image import __main__ as command
from trainyard.operate.image import layout, rules, sbom
from trainyard.operate.image.rules import Verdict


def verdict_on(draft: Draft, folder: Path) -> Verdict:
    draft.write(folder)
    image = layout.read(folder)
    sbom.write(image, folder)
    return rules.judge(rules.question_of(image, folder, PINS))


def test_a_good_image_keeps_every_rule(tmp_path: Path) -> None:
    verdict = verdict_on(good(), tmp_path / "image")
    assert verdict.findings == ()
    assert len(verdict.held) == len(rules.EVERYWHERE) + len(rules.WITH_CUDA) and verdict.not_applied == ()


Change = Callable[[Draft], object]


def put(path: str, text: str = "x", mode: int = 0o644, layer: int = 1, user: int = 0) -> Change:
    return lambda draft: draft.layers[layer].update({path: Entry(text, mode, user)})


def drop(path: str, layer: int) -> Change:
    return lambda draft: draft.layers[layer].pop(path)


def label(name: str, value: str) -> Change:
    return lambda draft: draft.config["Labels"].update({name: value})


def variable(text: str) -> Change:
    return lambda draft: draft.config["Env"].append(text)


def nccl(version: str) -> Change:
    def change(draft: Draft) -> None:
        (old,) = (path for path in draft.layers[1] if "nvidia_nccl" in path)
        del draft.layers[1][old]
        draft.layers[1].update(python_package("nvidia-nccl-cu13", version))

    return change


KEY = "AKIA" + "IOSFODNN7EXAMPLE"
BAD: dict[str, tuple[Change, str, str]] = {
    "base by tag": (label("org.opencontainers.image.base.digest", "latest"), "base-is-pinned", "latest"),
    "no code digest": (label("io.trainyard.code-digest", ""), "code-is-named", "code-digest"),
    "shell entry point": (
        lambda draft: draft.config.update(Entrypoint=["/bin/sh", "-c", "train"]),
        "entrypoint-trains",
        "exec form",
    ),
    "no train": (drop("opt/trainyard/bin/train", 1), "entrypoint-trains", "is no program"),
    "not executable": (put("opt/trainyard/bin/train", mode=0o644), "entrypoint-trains", "is no program"),
    "train not on the PATH": (
        lambda draft: draft.config.update(Env=["PATH=/usr/bin"]),
        "entrypoint-trains",
        "PATH is '/usr/bin'",
    ),
    "other user": (lambda draft: draft.config.update(User="trainer"), "user-is-there", "starts as trainer"),
    "no user": (drop("etc/passwd", 1), "user-is-there", "no user trainer"),
    "cuda-compat": (drop("usr/local/cuda-13.0/.wh.compat", 1), "cuda-compat-is-absent", "NCCL has hung"),
    "cuda-compat of the second layer": (
        put("usr/local/cuda/compat/libcuda.so.580.1"),
        "cuda-compat-is-absent",
        "cuda/compat/libcuda.so.580.1",
    ),
    "first bad NCCL": (nccl("2.28.3"), "nccl-is-good", "2.28.3-2.28.8"),
    "last bad NCCL": (nccl("2.28.8"), "nccl-is-good", "NCCL 2.28.8"),
    "bad NCCL by its file": (put("usr/lib/libnccl.so.2.28.5"), "nccl-is-good", "libnccl.so.2.28.5"),
    "two NCCLs": (put("usr/lib/libnccl.so.2.27.1"), "nccl-is-good", "several NCCLs"),
    "no NCCL": (
        lambda draft: [draft.layers[1].pop(path) for path in list(draft.layers[1]) if "nccl" in path],
        "nccl-is-good",
        "has no NCCL",
    ),
    "no libfabric": (drop("opt/amazon/efa/lib/libfabric.so.1", 0), "efa-is-there", "no libfabric"),
    "no EFA provider": (
        drop("usr/lib/x86_64-linux-gnu/libibverbs/libefa-rdmav34.so", 0),
        "efa-is-there",
        "verbs provider",
    ),
    "no plugin": (
        lambda draft: [draft.layers[0].pop(path) for path in list(draft.layers[0]) if "libnccl-net" in path],
        "efa-is-there",
        "has no libnccl-net.so (aws-ofi-nccl) where NCCL's loader looks; take a base",
    ),
    "plugin beside the loader's way": (
        drop("usr/lib/libnccl-net.so", 0),
        "efa-is-there",
        "where NCCL's loader looks: it has /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so; link it",
    ),
    "old advice": (variable("NCCL_PROTO=simple"), "network-is-left-alone", "NCCL_PROTO"),
    "fork safe": (variable("RDMAV_FORK_SAFE=1"), "network-is-left-alone", "RDMAV_FORK_SAFE"),
    "secret variable": (variable("HF_TOKEN=x"), "holds-no-secret", "variable HF_TOKEN"),
    "secret in the history": (
        lambda draft: draft.history.append(f"RUN AWS_KEY={KEY} aws s3 cp s3://a b"),
        "holds-no-secret",
        "history entry 2 holds an AWS access key",
    ),
    "secret in a label": (label("note", KEY), "holds-no-secret", "label note"),
    "secret file, deleted later": (
        lambda draft: (
            draft.layers[0].update({"root/.aws/credentials": Entry("[default]")}),
            draft.layers[1].update({"root/.aws/.wh.credentials": Entry()}),
        ),
        "holds-no-secret",
        "layer 0 has /root/.aws/credentials",
    ),
    "pip's password": (
        put("etc/pip.conf", "[global]\nindex-url = https://me:hunter2@pypi.example.com/simple\n"),
        "holds-no-secret",
        "a password in a URL",
    ),
    "setuid": (drop("usr/bin/su", 1), "rights-are-plain", "/usr/bin/su is setuid"),
    "writable for all": (put("opt/tool", mode=0o666), "rights-are-plain", "writable for everybody"),
    "our code is the user's": (put("opt/trainyard/bin/extra", user=1001), "rights-are-plain", "belongs to uid 1001"),
    "old package": (
        lambda draft: [draft.layers[1].pop(path) for path in list(draft.layers[1]) if "numpy" in path],
        "packages-are-locked",
        "numpy is missing, the lock says 2.5.0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_found_by_its_rule_alone(name: str, tmp_path: Path) -> None:
    change, rule, words = BAD[name]
    draft = good()
    change(draft)
    verdict = verdict_on(draft, tmp_path / "image")
    assert {finding.rule for finding in verdict.findings} == {rule}
    assert any(words in str(finding) for finding in verdict.findings), verdict.findings
    assert all("\n" not in str(finding) for finding in verdict.findings)


def test_the_plugin_is_found_where_the_images_own_variable_leads(tmp_path: Path) -> None:
    draft = good()
    del draft.layers[0]["usr/lib/libnccl-net.so"]
    draft.layers[0]["opt/amazon/ofi-nccl/lib/libnccl-net.so"] = Entry("elf")
    draft.config["Env"].append("LD_LIBRARY_PATH=/opt/other/lib:/opt/amazon/ofi-nccl/lib/:")
    assert verdict_on(draft, tmp_path / "image").findings == ()


def test_every_rule_has_a_bad_image() -> None:
    wanted = {rules.name_of(rule) for rule in (*rules.EVERYWHERE, *rules.WITH_CUDA)}
    assert {rule for _, rule, _ in BAD.values()} | {"packages-are-listed"} == wanted


def test_the_list_of_packages_must_be_this_images(tmp_path: Path) -> None:
    folder = good().write(tmp_path / "image")
    image = layout.read(folder)

    def found() -> list[str]:
        return [str(one) for one in rules.judge(rules.question_of(image, folder, PINS)).findings]

    assert len(found()) == 1 and "has no sbom.cdx.json" in found()[0]
    path = sbom.write(image, folder)
    assert found() == []
    path.write_text(path.read_text().replace("2.12.0", "2.11.0"))
    assert len(found()) == 1 and "is not this image's" in found()[0]


def test_an_image_for_cpus_says_what_was_not_asked(tmp_path: Path) -> None:
    draft = good()
    draft.config["Labels"]["io.trainyard.accelerator"] = "cpu"
    del draft.layers[0]["opt/amazon/efa/lib/libfabric.so.1"]
    verdict = verdict_on(draft, tmp_path / "image")
    assert verdict.findings == ()
    assert verdict.not_applied == ("cuda-compat-is-absent", "nccl-is-good", "efa-is-there")


def test_the_list_of_packages_is_the_images_and_the_same_every_time(tmp_path: Path) -> None:
    images = [layout.read(good().write(tmp_path / name)) for name in ("one", "two")]
    first, second = (
        [sbom.write(image, tmp_path / name).read_bytes()] for image, name in zip(images, ("one", "two"), strict=True)
    )
    assert first == second
    told = json.loads(first[0])
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert told["metadata"]["component"]["version"] == images[0].digest
    assert [part["purl"] for part in told["components"]] == [
        "pkg:deb/ubuntu/libc6@2.36-9?arch=amd64",
        "pkg:pypi/numpy@2.5.0",
        "pkg:pypi/nvidia-nccl-cu13@2.29.7",
        "pkg:pypi/pydantic@2.12.0",
    ]


def test_a_damaged_layout_is_refused(tmp_path: Path) -> None:
    draft = good()
    draft.layers[0]["etc/large"] = Entry(random.Random(0).randbytes(60_000).hex())  # read while it is unpacked
    folder = draft.write(tmp_path / "image")
    largest = max((folder / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(InputError, match=r"build (it|the image|or copy)"):
        layout.read(folder)
    for at in range(10, len(whole), len(whole) // 100):  # what deflate can't read, between files and within them
        largest.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(InputError, match=r"build (the image again|or copy)"):
            layout.read(folder)
    largest.unlink()
    with pytest.raises(InputError, match="is missing; build or copy"):
        layout.read(folder)
    with pytest.raises(InputError, match="is no OCI layout"):
        layout.read(tmp_path)


def test_a_folder_that_a_layer_makes_anew_hides_what_lay_in_it(tmp_path: Path) -> None:
    draft = good()
    draft.layers[0]["srv/a/old"] = Entry("x")
    draft.layers[1] |= {"srv/a/.wh..wh..opq": Entry(), "srv/a/new": Entry("y")}
    files = layout.read(draft.write(tmp_path / "image")).files
    assert "srv/a/new" in files and "srv/a/old" not in files


def test_the_command_says_it_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    draft = good()
    draft.config["User"] = "nobody"
    folder = draft.write(tmp_path / "image")
    sbom.write(layout.read(folder), folder)
    assert command.main(["check", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "user-is-there: starts as nobody" in said and "docs/image.md" in said
    assert command.main(["check", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "user-is-there" in {finding["rule"] for finding in told["findings"]}
