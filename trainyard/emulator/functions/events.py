"""EventBridge's part: a training job's change of state, and a queued job's end, reach the functions that rules name.

Rules, patterns and targets are those of moto's EventBridge, where the stacks put them; only targets that are functions
are called, and only where the function's own policy lets the rule (as on AWS, where the call is refused in silence).
A call that fails is repeated as Lambda does with asynchronous ones: twice, sooner than there. Rules with a rate are
called by the clock, the first time a period after they were put there, and by events too where they have a pattern as
well; those with a cron expression never by the clock.
"""

import json
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from trainyard.emulator.functions.runs import Functions, Run, UnknownFunctionError
from trainyard.emulator.info import EmulatorInfo

DETAIL_TYPE = "SageMaker Training Job State Change"
SERVICE_JOB_DETAIL_TYPE = "Batch Service Job State Change"
_RETRIES = 2
"""Lambda's own number for asynchronous invocations (developer guide, "Error handling"); its waits are minutes."""
_RETRY_SECONDS = 1.0
_NUM_WORKERS = 2
_MOST_KEPT = 200
_CLOCK_SECONDS = 1.0
_RATE = re.compile(r"rate\((\d+) (minute|hour|day)s?\)")
_UNIT_SECONDS = {"minute": 60.0, "hour": 3600.0, "day": 86_400.0}

Lookup = Callable[[Mapping[str, Any]], list[tuple[str, dict[str, Any]]]]
"""An event to the rules that match it: (the rule's ARN, one of its targets)."""


class Schedule:
    """When rules with a rate are due."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def due(self, rules: Iterable[tuple[str, str]], now: float) -> list[str]:
        """ARNs of the rules (ARN, schedule expression) whose time has come; a rule that is gone is forgotten."""
        periods = {
            arn: int(rate[1]) * _UNIT_SECONDS[rate[2]] for arn, words in rules if (rate := _RATE.fullmatch(words))
        }
        self._at = {arn: self._at.get(arn, now + seconds) for arn, seconds in periods.items()}
        found = [arn for arn, at in self._at.items() if now >= at]
        self._at |= {arn: now + periods[arn] for arn in found}
        return found


class EventBus:
    """Delivers events in the background, in no promised order and perhaps at the same time; thread-safe."""

    def __init__(self, info: EmulatorInfo, functions: Functions, lookup: Lookup | None = None) -> None:
        """`lookup`: the rules; None: those of moto's EventBridge."""
        self._info, self._functions = info, functions
        self._lookup = lookup or self._rules
        self._waiting: queue.Queue[tuple[str, bytes, int]] = queue.Queue()
        self._lock = threading.Lock()
        self.deliveries: list[dict[str, Any]] = []
        """Newest last: `function`, `event`, `attempt`, `payload`, `error`, `log`; or `refused`."""
        for number in range(_NUM_WORKERS):
            threading.Thread(target=self._work, daemon=True, name=f"events-{number}").start()
        if lookup is None:
            threading.Thread(target=self._tick, daemon=True, name="events-clock").start()

    def job_changed(self, description: Mapping[str, Any]) -> None:
        """Tell the rules of a training job's new state; `description` is DescribeTrainingJob's answer."""
        self._tell("aws.sagemaker", DETAIL_TYPE, description["TrainingJobArn"], description)

    def service_job_ended(self, description: Mapping[str, Any]) -> None:
        """Tell the rules of the end of a job in a training queue; `description` is DescribeServiceJob's answer, of
        which Batch leaves two fields out (its user guide, "Service job state change events")."""
        told = {name: said for name, said in description.items() if name not in ("serviceRequestPayload", "tags")}
        self._tell("aws.batch", SERVICE_JOB_DETAIL_TYPE, description["jobArn"], told)

    def _tell(self, source: str, detail_type: str, arn: str, description: Mapping[str, Any]) -> None:
        self.put(
            {
                "version": "0",
                "id": str(uuid.uuid4()),
                "detail-type": detail_type,
                "source": source,
                "account": self._info.account,
                "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "region": self._info.region,
                "resources": [arn],
                "detail": json.loads(json.dumps(dict(description), default=_milliseconds)),
            }
        )

    def put(self, event: Mapping[str, Any]) -> None:
        """Deliver an event to every rule that matches it."""
        for rule, target in self._lookup(event):
            self._deliver(rule, target, event)

    def _deliver(self, rule: str, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        if ":function:" not in target["Arn"]:
            return  # topics have nobody here who listens
        try:
            permitted = self._functions.permits(target["Arn"], "events.amazonaws.com", rule)
        except UnknownFunctionError:
            permitted = False
        if not permitted:
            self._note({"function": target["Arn"], "refused": f"its policy doesn't let {rule} call it"})
            return
        self._waiting.put((target["Arn"], input_of(target, event), 1))

    def _enabled(self) -> list[Any]:
        from moto.events.models import events_backends

        buses = events_backends[self._info.account][self._info.region].event_buses
        return [rule for rule in list(buses["default"].rules.values()) if rule.state == "ENABLED"]

    def _rules(self, event: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [
            (rule.arn, target)
            for rule in self._enabled()
            if rule.event_pattern.get_pattern() and rule.event_pattern.matches_event(event)
            for target in list(rule.targets)
        ]

    def _tick(self) -> None:
        schedule = Schedule()
        while True:
            time.sleep(_CLOCK_SECONDS)
            rules = {rule.arn: rule for rule in self._enabled() if rule.scheduled_expression}
            due = schedule.due([(arn, rule.scheduled_expression) for arn, rule in rules.items()], time.monotonic())
            for arn in due:
                event = {"source": "aws.events", "detail-type": "Scheduled Event", "resources": [arn], "detail": {}}
                for target in list(rules[arn].targets):
                    self._deliver(arn, target, event)

    def _work(self) -> None:
        while True:
            function, event, attempt = self._waiting.get()
            try:
                run = self._functions.invoke(function, event)
            except UnknownFunctionError as error:
                run = Run(str(error).encode(), "Unknown")
            except Exception as error:
                # Whatever it is: a worker that ended would take every later event with it.
                run = Run(f"{type(error).__name__}: {error}".encode(), "Unhandled")
            self._note(
                {
                    "function": function,
                    "event": _read(event),
                    "attempt": attempt,
                    "payload": run.payload.decode("utf-8", "replace"),
                    "error": run.error,
                    "log": run.log,
                }
            )
            if run.error and attempt <= _RETRIES:
                again = threading.Timer(_RETRY_SECONDS * attempt, self._waiting.put, [(function, event, attempt + 1)])
                again.daemon = True
                again.start()

    def _note(self, delivery: dict[str, Any]) -> None:
        with self._lock:
            self.deliveries.append(delivery)
            del self.deliveries[:-_MOST_KEPT]


def _read(event: bytes) -> Any:
    """The JSON, or the text where it is none: a target's constant Input may be anything."""
    text = event.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def input_of(target: Mapping[str, Any], event: Mapping[str, Any]) -> bytes:
    """What a target gets of an event: all of it, a part, a constant, or what its transformer makes of it."""
    if "Input" in target:
        return str(target["Input"]).encode()
    if "InputPath" in target:
        return json.dumps(_at(event, target["InputPath"])).encode()
    transformer = target.get("InputTransformer")
    if transformer is None:
        return json.dumps(event).encode()
    values = {name: _at(event, path) for name, path in (transformer.get("InputPathsMap") or {}).items()}
    return _filled(transformer["InputTemplate"], values).encode()


def _at(event: Mapping[str, Any], path: str) -> Any:
    """The value at `$.detail.Name`; None where there is none (EventBridge knows no other steps than names)."""
    value: Any = event
    for name in path.removeprefix("$").split(".")[1:]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with its <names> replaced: by JSON, inside quotes by the bare text (EventBridge user guide)."""
    made, is_quoted, at = [], False, 0
    while at < len(template):
        end = template.find(">", at)
        name = template[at + 1 : end] if template[at] == "<" and end > at else ""
        if name in values:
            text = json.dumps(values[name])
            bare = text[1:-1] if isinstance(values[name], str) else text
            made.append(bare if is_quoted else text)
            at = end + 1
            continue
        if template[at] == "\\":
            made.append(template[at : at + 2])
            at += 2
            continue
        is_quoted ^= template[at] == '"'
        made.append(template[at])
        at += 1
    return "".join(made)


def _milliseconds(value: Any) -> Any:
    """Times in an event's detail are numbers."""
    return int(value.timestamp() * 1000) if isinstance(value, datetime) else str(value)
