"""The hosts of one job agree on when its ranks stop and whether they start again. Imports no torch.

Every start of the ranks is a round. Each host reports how its share of the round ended. The first failure stops the
others' ranks; when all hosts have reported, one of them, the first, judges, and all do the same. The hosts talk over
one TCP connection each to the first host, in lines of JSON; a host that falls silent is lost, and the job with it, and
so is one that has not come in time.
"""

import contextlib
import json
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

from trainer.host.recovery import Ending, Restart, RestartPolicy, cause
from trainer.speech import say
from trainyard.errors import JobFailedError

SILENCE_SECONDS = 30.0
"""A host that said nothing for so long is lost."""
LOST_HOST = re.compile(r"^(the first )?host \S+ is gone")
"""How the reason begins of an ending that is another host's loss: the program is sound."""
TELL_SECONDS = 60.0
"""A host that is missed for so long is named, and again each time that it has been missed for twice as long."""
_PINGS = 6
"""So many fall into SILENCE_SECONDS."""
_MOST_NAMES = 8
"""Of missing hosts in a line."""

Stop = Literal["failed", "hang", "told", "lost"]
"""Why this host's ranks are to stop: one failed or hangs elsewhere, a host was told to stop, or a host is gone."""


class Hosts(Protocol):
    """What a host knows of the others."""

    @property
    def start(self) -> str:
        """A name that all hosts have for this start of the job, and no other start has; empty where none was told."""

    def wants_stop(self) -> Stop | None:
        """Whether the ranks that run here now have to stop."""

    def tell_of_hang(self) -> bool:
        """A rank hangs here: the others look at theirs too, which the end of this one's would end. False: no others."""

    def tell_of_answers(self) -> None:
        """This host's ranks have told where they stand: for the hang's sake the others' need live no longer."""

    def have_answered(self) -> bool:
        """Whether all hosts have told so in this round."""

    def conclude(self, ending: Ending, is_time_up: Callable[[], bool] = ...) -> Restart | Ending:
        """Report how this host's ranks ended; what all hosts do now. Waits for the others, until time is up: then this
        host's ending is its own."""

    def close(self) -> None:
        """Let go of the others."""


def _never() -> bool:
    return False


class OneHost:
    """A job of one host judges for itself."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.start = ""

    def wants_stop(self) -> Stop | None:
        """See Hosts."""
        return None

    def tell_of_hang(self) -> bool:
        """See Hosts."""
        return False

    def tell_of_answers(self) -> None:
        """See Hosts."""

    def have_answered(self) -> bool:
        """See Hosts."""
        return False

    def conclude(self, ending: Ending, is_time_up: Callable[[], bool] = _never) -> Restart | Ending:
        """See Hosts."""
        return judged(self._policy, {"": ending})

    def close(self) -> None:
        """See Hosts."""


def judged(policy: RestartPolicy, endings: dict[str, Ending]) -> Restart | Ending:
    """What follows from all hosts' endings."""
    ending = cause(endings)
    if not ending.is_failure or any(one.was_told_to_stop for one in endings.values()):
        return ending
    return policy.judge(ending)


class Judge:
    """The first host's side: hears every host, tells every host."""

    def __init__(
        self,
        hosts: Sequence[str],
        address: str,
        port: int,
        policy: RestartPolicy,
        *,
        arrival_seconds: float,
        silence_seconds: float = SILENCE_SECONDS,
        tell_seconds: float = TELL_SECONDS,
    ) -> None:
        """`arrival_seconds`: a host that has not come by then is lost, once those that have can't go on without it.
        `tell_seconds`: after so long the log has who is missed; nobody is given up by that."""
        self._closed = threading.Event()
        self._arrival_seconds = arrival_seconds
        self._silence_seconds = silence_seconds
        self._start = secrets.token_hex(8)
        self._hosts = frozenset(hosts)
        self._order = list(hosts)
        self._came: set[str] = set()
        self._policy = policy
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}
        self._endings: dict[str, Ending] = {}
        self._answered: set[str] = set()
        self._stop: Stop | None = None
        """What all were told in this round, who comes later too."""
        self._is_over = False
        self._is_late = False
        """The time is over in which hosts may come."""
        try:
            self._listener = socket.create_server((address, port))
        except OSError as error:
            raise JobFailedError(
                f"port {port} of {address}, on which the hosts agree, can't be opened: {error.strerror}"
            ) from None
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._tell_of_missing, args=(tell_seconds,), daemon=True).start()
        self._timer = threading.Timer(arrival_seconds, self._on_late)
        self._timer.daemon = True
        self._timer.start()

    def _on_late(self) -> None:
        with self._lock:
            self._is_late = True
            self._go_on()

    def _tell_of_missing(self, seconds: float) -> None:
        """In the log of the first host: torchrun, which waits for the same hosts, says nothing for 15 minutes."""
        waited, missed = 0.0, self._hosts
        while not self._closed.wait(seconds - waited):
            waited, seconds = seconds, 2 * seconds
            with self._lock:
                missed = self._hosts - set(self._came)
            if not missed:
                return
            names = sorted(missed, key=self._order.index)
            shown = [*names[:_MOST_NAMES], *([f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else [])]
            say(
                f"hosts: {len(missed)} of {len(self._hosts)} not here after {waited:.0f} s: {', '.join(shown)};"
                " does its machine run, and what does its own log say?"
            )

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._hear, args=(_Connection(accepted, self._silence_seconds),), daemon=True
            ).start()

    def _hear(self, connection: "_Connection") -> None:
        hello = connection.receive()
        host = str(hello.get("host")) if hello else ""
        with self._lock:
            if host not in self._hosts or host in self._connections:
                connection.close()
                return
            self._connections[host] = connection
            self._came.add(host)
            connection.send({"start": self._start})
            if self._stop is not None:
                connection.send({"stop": self._stop})
        while (message := connection.receive()) is not None:
            with self._lock:
                if "ending" in message:
                    self._note(host, _ending(message["ending"]))
                elif "hang" in message:
                    self._tell_stop("hang")
                elif "answered" in message:
                    self._answered.add(host)
                    if self._answered == self._hosts:
                        self._tell_all({"answered": True})
        with self._lock:
            self._lost(host)

    def _note(self, host: str, ending: Ending) -> None:
        if self._is_over:  # a host was lost: what the others say afterwards is theirs alone
            return
        self._endings[host] = ending
        if ending.exit_code != 0:
            self._tell_stop(_stop(ending))
        self._go_on()

    def _go_on(self) -> None:
        """Conclude, where there is nobody left to wait for."""
        waited_for = self._hosts - set(self._endings)
        if self._is_over or not self._endings or not waited_for.isdisjoint(self._connections):
            return
        # Who has never come saves nothing that others, once told to stop, would have to wait for.
        if not waited_for or any(ending.was_told_to_stop for ending in self._endings.values()):
            self._conclude(judged(self._policy, self._endings))
        elif self._is_late:
            why = f"it has not come within {self._arrival_seconds:.0f} s (recovery.arrival_seconds)"
            self._lost(min(waited_for), f"{why}: did its machine start, and what does its own log say?")

    def _lost(self, host: str, why: str = "its entrypoint was killed, or the network parted") -> None:
        if self._is_over:
            return
        # Its own reason, where it gave one, says more; and what is done stays done.
        known = dict(self._endings)
        known.setdefault(host, Ending(1, f"host {host} is gone: {why}"))
        self._tell_all({"stop": "lost"})
        self._conclude(cause(known))

    def _conclude(self, order: Restart | Ending) -> None:
        self._endings, self._answered, self._stop = {}, set(), None
        kind = "restart" if isinstance(order, Restart) else "finish"
        self._is_over = kind == "finish"
        self._tell_all({kind: asdict(order)})

    def _tell_stop(self, stop: Stop) -> None:
        if self._stop is None:
            self._stop = stop
            self._tell_all({"stop": stop})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._timer.cancel()
        self._listener.close()


class ManyHosts:
    """A host's side; the first host has the judge beside it."""

    def __init__(
        self,
        host: str,
        address: str,
        port: int,
        *,
        judge: Judge | None,
        patience_seconds: float,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._judge = judge
        self._connection = _Connection(_connect(address, port, patience_seconds), silence_seconds)
        self._connection.send({"host": host})
        self._first = address
        self.start = ""
        self._stop: Stop | None = None
        self._have_answered = False
        self._orders: queue.Queue[Restart | Ending] = queue.Queue()
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        while (message := self._connection.receive()) is not None:
            if "stop" in message:
                self._stop = message["stop"]
            elif "start" in message:
                self.start = str(message["start"])
            elif "answered" in message:
                self._have_answered = True
            elif "restart" in message:
                values = message["restart"]
                self._orders.put(Restart(**{**values, "failure": _ending(values["failure"])}))
            elif "finish" in message:
                self._orders.put(_ending(message["finish"]))
        self._stop = "lost"
        self._orders.put(
            Ending(1, f"the first host ({self._first}) is gone: its entrypoint was killed, or the network parted")
        )

    def wants_stop(self) -> Stop | None:
        """See Hosts."""
        return self._stop

    def tell_of_hang(self) -> bool:
        """See Hosts."""
        self._connection.send({"hang": True})
        return True

    def tell_of_answers(self) -> None:
        """See Hosts."""
        self._connection.send({"answered": True})

    def have_answered(self) -> bool:
        """See Hosts."""
        return self._have_answered

    def conclude(self, ending: Ending, is_time_up: Callable[[], bool] = _never) -> Restart | Ending:
        """See Hosts."""
        self._connection.send({"ending": asdict(ending)})
        while True:
            # Not for ever at once: signals are handled between two looks.
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=0.2)
                break
            if is_time_up():
                return ending
        if isinstance(order, Restart):
            self._stop, self._have_answered = None, False
            return order
        return ending if self._stop == "lost" and ending.outweighs_a_lost_host else order

    def close(self) -> None:
        """See Hosts."""
        if self._judge is not None:
            # The others have yet to read the last order.
            time.sleep(0.2)
            self._judge.close()
        self._connection.close()


def _connect(address: str, port: int, patience_seconds: float, tell_seconds: float = TELL_SECONDS) -> socket.socket:
    began = time.monotonic()
    deadline = began + patience_seconds
    while True:
        try:
            return socket.create_connection((address, port), timeout=SILENCE_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise JobFailedError(
                    f"the first host ({address} port {port}) does not answer after {patience_seconds:.0f} s:"
                    f" {error.strerror or error}; does the security group let itself in?"
                ) from None
            if (waited := time.monotonic() - began) > tell_seconds:
                tell_seconds *= 2
                say(
                    f"hosts: the first host ({address} port {port}) does not answer after {waited:.0f} s:"
                    f" {error.strerror or error}; does its machine run, and what does its own log say?"
                )
        time.sleep(0.25)


class _Connection:
    """Lines of JSON over a socket, with pings of its own both ways."""

    def __init__(self, connected: socket.socket, silence_seconds: float) -> None:
        connected.settimeout(silence_seconds)
        self._ping_seconds = silence_seconds / _PINGS
        self._socket = connected
        self._reader = connected.makefile("r", encoding="utf-8")
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._ping, daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Say it; a lost peer shows in `receive`."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message that is no ping; None when the peer is gone or silent."""
        while True:
            try:
                line = self._reader.readline()
            except (OSError, ValueError):
                return None
            if not line.endswith("\n"):
                return None
            try:
                message = json.loads(line)
            except ValueError:
                return None
            if isinstance(message, dict) and "ping" not in message:
                return message

    def _ping(self) -> None:
        while not self._closed.wait(self._ping_seconds):
            self.send({"ping": 1})

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _stop(ending: Ending) -> Stop:
    if ending.was_told_to_stop or not ending.is_failure:
        return "told"
    return "hang" if ending.is_hang else "failed"


def _ending(values: dict[str, Any]) -> Ending:
    return Ending(**{**values, "details": tuple(values["details"])})
