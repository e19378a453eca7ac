"""A job's meters (`trainyard.spec.meters`) for others to read: Prometheus' text, CloudWatch's embedded metrics.

Prometheus: the newest values in DIR/metrics.prom (whole or not at all; for node_exporter's textfile collector), and at
http://HOST:PORT/metrics where the job states a port. CloudWatch: a line of JSON on stdout, which CloudWatch Logs turns
into metrics by itself; a job that runs elsewhere writes none.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from trainer.speech import say
from trainyard.spec.meters import BY_NAME, METERS, NAMESPACE, PERIOD_MINUTES, Meter

PROMETHEUS_FILE = "metrics.prom"
LEAST_SECONDS = 10.0
"""Between two writings of the file: nobody reads it more often, a step may take milliseconds, and to put one file in
another's place takes 3 ms on ext4, which first writes the new one to the disk."""


class _Event(NamedTuple):
    """Something that happened once, shown for a period."""

    meter: Meter
    value: float
    ends_at: float
    """By the monotonic clock."""


class Exposition:
    """The newest value of each meter, told on."""

    def __init__(
        self,
        output_dir: Path,
        *,
        tenant: str,
        job: str,
        port: int | None = None,
        embeds_metrics: bool = False,
        every_steps: int = 50,
    ) -> None:
        """`job`: the spec's name, not an id: each id would be a new series to keep and to pay.

        `embeds_metrics`: lines for CloudWatch, every `every_steps`, when a row has rare figures, and of the first row
        of each of CloudWatch's periods, as alarms count the periods of which they hear.
        """
        self._path = output_dir / PROMETHEUS_FILE
        self._labels = {"tenant": tenant, "training_job": job}
        self._values: dict[Meter, float] = {}
        self._events: list[_Event] = []
        """Oldest first: what happened within the period."""
        self._embeds_metrics, self._every_steps = embeds_metrics, every_steps
        self._written_at = float("-inf")
        self._embedded_period = _period_of(time.time())
        self._lock = threading.Lock()
        self._end: threading.Timer | None = None
        self._has_complained = False
        self._told_at = time.monotonic()
        self._aged_period = self._embedded_period
        self._closed = threading.Event()
        self._text = ""
        self._server = None if port is None else _serve(port, lambda: self._text)
        self._aging = threading.Thread(target=self._grow_old, name="meters-age", daemon=True)
        self._aging.start()

    def publish(self, row: Mapping[str, Any]) -> None:
        """Takes a step's row over, with `live` beside its own keys."""
        found = {meter: value for meter in METERS if (value := meter.read(row)) is not None}
        now = time.monotonic()
        events = [_Event(meter, value, now + EVENT_SECONDS) for meter, value in found.items() if meter.is_event]
        with self._lock:
            self._values |= found
            self._told_at = now
            if events:
                self._events += events
                self._show_events()
                self._end_later()
            if self._server is not None:
                self._text = prometheus_text(self._values, self._labels)
            if events or now - self._written_at >= LEAST_SECONDS:
                self._write()
        wall = time.time()
        is_first = _period_of(wall) != self._embedded_period
        if self._embeds_metrics and (row["step"] % self._every_steps == 0 or events or _RARE & row.keys() or is_first):
            self._embedded_period = _period_of(wall)
            # What is observed of long steps is rare: the newest still holds, and a period without counts as a good one.
            kept = {meter: self._values[meter] for meter in _OF_TENANTS if meter in self._values}
            say(embedded(kept | found, self._labels, at_milliseconds=int(1000 * wall)))

    def _show_events(self) -> None:
        """Of one meter the longest, as CloudWatch's Maximum: a good start must not hide the bad one before it."""
        for meter in _EVENTS:
            self._values.pop(meter, None)
        for event in self._events:
            self._values[event.meter] = max(event.value, self._values.get(event.meter, event.value))

    def _end_later(self) -> None:
        """By the clock: the next step may be long in coming. Each has a period of its own, whatever happens in it."""
        if self._end is None and self._events:
            self._end = threading.Timer(self._events[0].ends_at - time.monotonic(), self._end_old)
            self._end.daemon = True
            self._end.start()

    def _grow_old(self) -> None:
        """A job that stands still publishes no row, and what isn't told rings nobody: the age of its newest checkpoint
        is told on. One that was committed since the last step counts from the next."""
        while not self._closed.wait(AGE_SECONDS):
            with self._lock:
                now = self._aged()
                if self._closed.is_set() or now.get(_AGE) == self._values.get(_AGE):
                    continue
                self._write()
            period = _period_of(time.time())
            if self._embeds_metrics and period not in (self._aged_period, self._embedded_period):
                self._aged_period = period
                say(embedded({_AGE: now[_AGE]}, self._labels, at_milliseconds=int(1000 * time.time())))

    def _aged(self) -> dict[Meter, float]:
        """What holds now, some time after the last row."""
        age, silent = self._values.get(_AGE), time.monotonic() - self._told_at
        return self._values if age is None or silent < AGE_SECONDS else {**self._values, _AGE: age + silent}

    def _end_old(self) -> None:
        with self._lock:
            self._end, now = None, time.monotonic()
            self._take_back([event for event in self._events if event.ends_at > now])
            self._end_later()

    def end_events(self) -> None:
        """Takes back all that has happened."""
        with self._lock:
            self._take_back([])

    def _take_back(self, remaining: list[_Event]) -> None:
        self._events = remaining
        self._show_events()
        if self._values:
            self._write()

    def write(self) -> None:
        """Brings what is read elsewhere up to date."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        self._text = prometheus_text(self._aged(), self._labels)
        self._written_at = time.monotonic()
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            partial.write_text(self._text, encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:  # meters must not end a job; that a disk is full, a save will say with more force
            if not self._has_complained:
                say(f"meters: {self._path} can't be written: {error.strerror}")
            self._has_complained = True

    def close(self) -> None:
        """The last values, but for events, then nothing more."""
        self._closed.set()
        self._aging.join()
        with self._lock:
            if self._end is not None:
                self._end.cancel()
            self._take_back([])  # with nothing left, a timer that fired meanwhile is followed by none
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


EVENT_SECONDS = 60.0 * PERIOD_MINUTES
"""How long Prometheus can see an event: of its rules' looks, which are a period apart, one sees it, and no second one
(where scrapes divide the period evenly; else now and then none or two do)."""
AGE_SECONDS = 60.0
"""So long after a row the newest checkpoint's age is told without one, and each time it has passed again."""
_AGE = BY_NAME["checkpoint_age_seconds"]
_EVENTS = frozenset(meter for meter in METERS if meter.is_event)
_OF_TENANTS = [meter for meter in METERS if meter.per_tenant and not meter.is_event]

_RARE = frozenset({"observed", "checkpoint", "validation_loss"})
"""Keys of few rows, whose figures would be missed."""


def _period_of(wall_seconds: float) -> int:
    """Number of the alarms' period, which begins where CloudWatch's does: at the hour, and every five minutes."""
    return int(wall_seconds // (60 * PERIOD_MINUTES))


def prometheus_text(values: Mapping[Meter, float], labels: Mapping[str, str]) -> str:
    """The text exposition format, version 0.0.4."""
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    lines = []
    for meter, value in values.items():
        lines.append(f"# HELP {meter.prometheus_name} {meter.help}")
        lines.append(f"# TYPE {meter.prometheus_name} gauge")
        lines.append(f"{meter.prometheus_name}{{{pairs}}} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def embedded(values: Mapping[Meter, float], labels: Mapping[str, str], *, at_milliseconds: int) -> str:
    """One line in CloudWatch's embedded metric format: all meters for the job, some for its tenant as well."""

    def directive(dimensions: list[list[str]], meters: list[Meter]) -> dict[str, Any]:
        named = [{"Name": meter.cloudwatch_name, "Unit": meter.unit} for meter in meters]
        return {"Namespace": NAMESPACE, "Dimensions": dimensions, "Metrics": named}

    both = [meter for meter in values if meter.per_tenant]
    one = [meter for meter in values if not meter.per_tenant]
    directives = [directive([["Tenant", "Job"]], one)] if one else []
    directives += [directive([["Tenant", "Job"], ["Tenant"]], both)] if both else []
    content = {
        "_aws": {"Timestamp": at_milliseconds, "CloudWatchMetrics": directives},
        "Tenant": labels["tenant"],
        "Job": labels["training_job"],
        **{meter.cloudwatch_name: value for meter, value in values.items()},
    }
    return json.dumps(content, separators=(",", ":"))


def _serve(port: int, text: Callable[[], str]) -> ThreadingHTTPServer | None:
    """None, and a line that says so, where the port can't be had: meters must not end a job."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """/metrics, and nothing else."""
            is_known = self.path == "/metrics"
            body = text().encode() if is_known else b""
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """A scrape every few seconds is no news."""

    try:
        listener = _listener(port)
    except OSError as error:
        say(f"meters: nothing listens at port {port} (meters.prometheus_port): {error.strerror}")
        return None
    server = ThreadingHTTPServer(("", port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="meters", daemon=True).start()
    return server


def _listener(port: int) -> socket.socket:
    """On all addresses of both families; of IPv4 alone where the machine has no IPv6, or has it switched off."""
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
