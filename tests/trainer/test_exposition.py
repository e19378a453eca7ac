"""A job's meters, as Prometheus and CloudWatch read them."""

import errno
import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from trainer.observe import exposition as exposition_module
from trainer.observe.exposition import PROMETHEUS_FILE, Exposition, prometheus_text
from trainer.observe.network_use import NetworkUse
from trainer_testing.distributed import free_port

from trainyard.spec.meters import BY_NAME, LIVE, NAMESPACE, PERIOD_MINUTES

ROW: dict[str, Any] = {
    "step": 50,
    "attempt": 2,
    "loss": 2.5,
    "learning_rate": 1e-4,
    "grad_norm": None,
    "step_seconds": 0.5,
    "breakdown": {"data": 0.1, "checkpoint": 0.0},
    "observed": {"stragglers": [{"rank": 3}], "throughput": {"of_plan": 0.9, "mfu_causal": None}},
    LIVE: {"checkpoint_age_seconds": 12.0, "goodput": 0.75, "start_seconds": None},
}


def has_ipv6() -> bool:
    """Whether this machine has it, and not only its kernel."""
    with socket.socket(socket.AF_INET6) as own:
        return own.connect_ex(("::1", free_port())) == errno.ECONNREFUSED


def read(text: str) -> dict[str, float]:
    """Samples by name, labels dropped."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_file_has_the_newest_value_of_each_meter(tmp_path: Path) -> None:
    exposition = Exposition(tmp_path, tenant="acme", job="tiny")
    exposition.publish(ROW)
    exposition.publish({"step": 51, "loss": 2.25})
    exposition.close()
    text = (tmp_path / PROMETHEUS_FILE).read_text()
    found = read(text)
    assert found["trainyard_step"] == 51.0 and found["trainyard_loss"] == 2.25
    assert found["trainyard_data_seconds"] == 0.1 and found["trainyard_stragglers"] == 1.0
    assert found["trainyard_goodput"] == 0.75
    # A norm that overflowed, a device without a peak: no sample rather than a wrong one.
    assert not {"trainyard_grad_norm", "trainyard_mfu", "trainyard_start_seconds"} & found.keys()
    assert '# TYPE trainyard_loss gauge\ntrainyard_loss{tenant="acme",training_job="tiny"} 2.25\n' in text
    assert not list(tmp_path.glob("*.partial"))


def test_a_start_is_told_once_and_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow start must not make every later period a bad one."""
    monkeypatch.setattr(exposition_module.time, "time", lambda: 1_000_000.0)  # no period begins
    exposition = Exposition(tmp_path, tenant="acme", job="tiny", embeds_metrics=True, every_steps=10)

    def seen(step: int, seconds: float | None) -> bool:
        exposition.publish({"step": step, LIVE: {"start_seconds": seconds}})
        exposition.write()
        return "trainyard_start_seconds" in (tmp_path / PROMETHEUS_FILE).read_text()

    assert (seen(1, 900.0), seen(2, None), seen(10, None)) == (True, True, True)
    exposition.end_events()
    assert not seen(20, None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("StartSeconds") for line in lines] == [900.0, None, None], "at once, whatever step it is"
    exposition.publish({"step": 21, LIVE: {"start_seconds": 400.0}})
    found = read((tmp_path / PROMETHEUS_FILE).read_text())
    assert found["trainyard_start_seconds"] == 400.0, "at once, however lately the file was written"
    exposition.close()
    assert "trainyard_start_seconds" not in read((tmp_path / PROMETHEUS_FILE).read_text())


def test_an_event_is_seen_for_a_period_however_long_the_next_step_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exposition_module.EVENT_SECONDS == 60 * PERIOD_MINUTES
    monkeypatch.setattr(exposition_module, "EVENT_SECONDS", 0.05)
    exposition = Exposition(tmp_path, tenant="acme", job="tiny")
    exposition.publish({"step": 1, LIVE: {"start_seconds": 900.0}})
    deadline = time.monotonic() + 60
    while "trainyard_start_seconds" in (tmp_path / PROMETHEUS_FILE).read_text():
        assert time.monotonic() < deadline, "it waits for a step that may never come"
        time.sleep(0.01)
    assert "trainyard_step" in (tmp_path / PROMETHEUS_FILE).read_text()
    exposition.close()


def test_of_two_events_each_is_seen_for_its_own_period_and_the_longer_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposition = Exposition(tmp_path, tenant="acme", job="tiny")

    def shown() -> dict[str, float]:
        return {name: value for name, value in read((tmp_path / PROMETHEUS_FILE).read_text()).items() if value > 99}

    # The first ends by itself, within a moment; the second has the whole period before it.
    monkeypatch.setattr(exposition_module, "EVENT_SECONDS", 0.5)
    exposition.publish({"step": 1, LIVE: {"start_seconds": 900.0, "queue_seconds": 4000.0}})
    monkeypatch.setattr(exposition_module, "EVENT_SECONDS", 3600.0)
    exposition.publish({"step": 2, LIVE: {"start_seconds": 100.0, "recovery_seconds": 700.0}})
    later = {"trainyard_start_seconds": 100.0, "trainyard_recovery_seconds": 700.0}
    first = shown()
    if first != later:  # else this machine slept between two lines
        assert first == later | {"trainyard_start_seconds": 900.0, "trainyard_queue_seconds": 4000.0}
    deadline = time.monotonic() + 60
    while shown() != later:
        assert time.monotonic() < deadline, "the first is shown until the second ends"
        time.sleep(0.01)
    exposition.close()
    assert shown() == {}


def test_a_job_that_stands_still_tells_how_old_its_checkpoint_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its watchdog off (hang_seconds: null) nothing else rings: a period without figures is a good one."""
    clock = [1_000_000.0]
    monkeypatch.setattr(exposition_module, "AGE_SECONDS", 0.05)
    monkeypatch.setattr(exposition_module.time, "time", lambda: clock[0])
    exposition = Exposition(tmp_path, tenant="acme", job="tiny", embeds_metrics=True)
    exposition.publish({"step": 50, LIVE: {"checkpoint_age_seconds": 1100.0, "goodput": 0.9}})
    capsys.readouterr()
    said: list[dict[str, Any]] = []
    for period in (1, 2):
        clock[0] += 60 * PERIOD_MINUTES
        deadline = time.monotonic() + 60
        while len(said) < period:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            said += [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.keys() - {"_aws", "Tenant", "Job"} for line in said] == [{"CheckpointAgeSeconds"}] * 2, "and no more"
    first, second = (line["CheckpointAgeSeconds"] for line in said)
    assert 1100.0 < first < second
    shown = read((tmp_path / PROMETHEUS_FILE).read_text())
    assert shown["trainyard_checkpoint_age_seconds"] >= second and shown["trainyard_goodput"] == 0.9
    exposition.end_events()
    again = read((tmp_path / PROMETHEUS_FILE).read_text())["trainyard_checkpoint_age_seconds"]
    assert again >= second, "an event that ends makes it no younger"
    exposition.publish({"step": 51, LIVE: {"checkpoint_age_seconds": 3.0}})
    exposition.close()
    assert read((tmp_path / PROMETHEUS_FILE).read_text())["trainyard_checkpoint_age_seconds"] == 3.0


def test_labels_are_escaped() -> None:
    text = prometheus_text({BY_NAME["step"]: 1.0}, {"tenant": 'a"b\\c\nd'})
    assert text.splitlines()[2] == 'trainyard_step{tenant="a\\"b\\\\c\\nd"} 1.0'


def test_a_port_serves_what_the_file_has(tmp_path: Path) -> None:
    port = free_port()
    exposition = Exposition(tmp_path, tenant="acme", job="tiny", port=port)
    exposition.publish(ROW)
    exposition.publish(ROW | {"step": 51})
    if has_ipv6():
        with urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=60) as answer:
            assert "trainyard_" in answer.read().decode(), "of a cluster that has IPv6 alone"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert read(answer.read().decode())["trainyard_step"] == 51.0
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
    exposition.close()


def test_what_meters_cannot_have_ends_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    first = Exposition(tmp_path, tenant="acme", job="tiny", port=port)
    gone = tmp_path / "gone"
    second = Exposition(gone, tenant="acme", job="tiny", port=port)
    second.publish(ROW)
    second.write()
    second.close()
    first.close()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"meters: nothing listens at port {port}")
    assert [line for line in said if "can't be written" in line] == [said[1]], "once is enough"


def test_cloudwatch_gets_lines_when_somebody_would_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition_module.time, "time", lambda: 1_000_000.0)  # no period begins
    exposition = Exposition(tmp_path, tenant="acme", job="tiny", embeds_metrics=True, every_steps=10)
    exposition.publish({"step": 9, "loss": 3.0})
    exposition.publish({"step": 11, "loss": 3.0, "checkpoint": {"save_seconds": 4.0}})
    exposition.publish(ROW)
    exposition.close()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["Step"] for line in lines] == [11.0, 50.0]
    assert lines[0]["CheckpointSaveSeconds"] == 4.0
    (one, both) = lines[1]["_aws"]["CloudWatchMetrics"]
    assert one["Namespace"] == both["Namespace"] == NAMESPACE
    assert one["Dimensions"] == [["Tenant", "Job"]] and both["Dimensions"] == [["Tenant", "Job"], ["Tenant"]]
    assert {"Name": "ThroughputOfPlan", "Unit": "None"} in both["Metrics"]
    # Whatever is named must be there, and a number: CloudWatch drops the whole line otherwise, in silence.
    for directive in (one, both):
        assert all(isinstance(lines[1][metric["Name"]], float) for metric in directive["Metrics"])
        assert all(name in lines[1] for names in directive["Dimensions"] for name in names)
    assert (lines[1]["Tenant"], lines[1]["Job"]) == ("acme", "tiny")


def test_no_line_for_cloudwatch_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Exposition(tmp_path, tenant="acme", job="tiny").publish(ROW)
    assert capsys.readouterr().out == ""


def test_network_cards_are_summed_without_loopback(tmp_path: Path) -> None:
    table = "Inter-| Receive | Transmit\n face |bytes ...\n"
    card = "{}: {} 1 0 0 0 0 0 0 {} 1 0 0 0 0 0 0\n"
    proc = tmp_path / "dev"
    counters = tmp_path / "ib/rdmap0/ports/1/hw_counters"
    counters.mkdir(parents=True)

    def count(received: int, sent: int) -> None:
        rows = card.format("lo", 7, 7) + card.format("  eth0", received, sent)
        proc.write_text(table + rows)
        (counters / "rx_bytes").write_text(f"{received}\n")
        (counters / "tx_bytes").write_text(f"{sent}\n")

    count(100, 10)
    use = NetworkUse(proc_net=proc, infiniband=tmp_path / "ib")
    assert use.counted() == (20, 200)
    count(300, 60)
    sent, received = use.rates()
    assert received == pytest.approx(4 * sent) and sent > 0
    count(0, 0)  # a card was reset
    assert use.rates() == (0.0, 0.0)
    assert NetworkUse(proc_net=tmp_path / "none", infiniband=tmp_path / "none").counted() == (0, 0)


@pytest.mark.parametrize("step_seconds", [7, 60, 150, 170, 200, 239, 299])
def test_alarms_hear_of_each_period_of_a_job_whose_steps_are_long(
    step_seconds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty steps of a minute are most of an hour: of five-minute periods without a sample an alarm says that all is
    well, and a burn rate of nine bad ones in an hour would never be seen."""
    clock = {"now": 1_000_000.0}
    monkeypatch.setattr(exposition_module.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(exposition_module.time, "time", lambda: clock["now"])
    exposition = Exposition(tmp_path, tenant="acme", job="tiny", embeds_metrics=True, every_steps=50)
    period, heard, num_lines, num_steps = 60 * PERIOD_MINUTES, set(), 0, 7200 // step_seconds
    for step in range(1, num_steps + 1):
        clock["now"] += step_seconds
        slow = {"observed": {"throughput": {"of_plan": 0.5}}} if step in (1, 50) else {}
        exposition.publish({"step": step, **slow, LIVE: {"goodput": 0.1, "checkpoint_age_seconds": 60.0 * step}})
        for line in (json.loads(line) for line in capsys.readouterr().out.splitlines()):
            num_lines += 1
            heard.add(line["_aws"]["Timestamp"] // (1000 * period))
            assert (line["ThroughputOfPlan"], line["Goodput"]) == (0.5, 0.1), "of the last observed window, too"
            assert line["CheckpointAgeSeconds"] == 60.0 * step, "and what is new as it is now"
    first, last = (int((1_000_000 + seconds) // period) for seconds in (step_seconds, num_steps * step_seconds))
    assert heard == set(range(first, last + 1)) and len(heard) >= 24
    assert num_lines <= len(heard) + num_steps // 50 + 1, "and not of each step"
    exposition.close()
