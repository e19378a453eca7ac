"""A sweep from its record to its end: looks at its jobs, stops losers, holds the budget, starts the next; again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainyard.errors import AwsAwayError, InputError, TrainyardError
from trainyard.launch import watch
from trainyard.launch.backend import Say, SilentError
from trainyard.launch.place import Place
from trainyard.launch.record import JobRecord
from trainyard.launch.spending import spent
from trainyard.operate.course import Course, curve, units_per_second
from trainyard.operate.sweep.record import (
    LAUNCHING,
    REFUSED,
    UNANSWERED,
    WAITING,
    SweepRecord,
    SweepStore,
    Trial,
    trial_name,
)
from trainyard.operate.sweep.search import Search, Told
from trainyard.operate.sweep.standings import Standings, standings
from trainyard.operate.sweep.stopping import losers
from trainyard.spec.job import JobSpec

MOST_FAILED_LOOKS = 10
"""In a row at one job that end the sweep's process (and no job): a network that is away for a minute does not."""
MOST_FAILED_LAUNCHES = 10
"""Of one trial in a row, where AWS or the network says no and not trainyard itself, until it is given up."""
LATE_LOOKS = 30
"""At a failed trial that the tenant's resumer may start again, five minutes on AWS, before the sweep counts it as over:
the resumer acts within one, or not at all."""
BUDGET = "budget: "
"""A reason's beginning where it was money."""


class Launcher(Protocol):
    """How jobs of a sweep come into being and are found: the ordinary verbs' ways."""

    def load(self, name: str, overrides: Sequence[str]) -> JobSpec:
        """The job under that name with a trial's overrides; InputError where that is no job."""

    def reach(self) -> None:
        """TrainyardError where no job can be launched now: no such tenant, or nobody answers."""

    def plan_usd(self, spec: JobSpec) -> float | None:
        """What its plan says that it costs; None where no price is known."""

    def launch(self, spec: JobSpec) -> tuple[Place, JobRecord]:
        """Launch it as `trainyard launch` does."""

    def find(self, spec: JobSpec) -> tuple[Place, JobRecord] | None:
        """The job of that very name, where one was launched; None else."""

    def place(self, job_id: str) -> Place:
        """Where a job lives."""


def propose(
    search: Search, launcher: Launcher, token: str, job_name: str, before: Sequence[Trial], *, strict: bool = True
) -> Trial:
    """The trial after those, with its plan. Where its settings are no job's: InputError, or if not `strict` a refused
    trial, which a search that learns is told of as one that diverged: else it would propose the same for ever."""
    told = [Told(one.overrides, _value_told(one)) for one in before]
    number = len(before) + 1
    overrides = search.propose(number - 1, told)
    name = trial_name(job_name, token, number)
    try:
        planned = launcher.plan_usd(launcher.load(name, overrides))
    except InputError as error:
        if strict:
            raise
        return Trial(number=number, name=name, overrides=overrides, state=REFUSED, why=str(error))
    return Trial(number=number, name=name, overrides=overrides, planned_usd=planned)


def _value_told(trial: Trial) -> float | None:
    """What a search hears of a trial: nothing while it may still become better."""
    if trial.diverged or trial.state == REFUSED:
        return math.inf
    return trial.value if trial.is_over else None


def _is_unanswered(error: TrainyardError) -> bool:
    """Whether it says nothing of what was asked: who is asked again may answer."""
    return bool(error.may_run) or isinstance(error, AwsAwayError | SilentError)


def first_trials(search: Search, launcher: Launcher, token: str, job_name: str) -> tuple[Trial, ...]:
    """All trials of a search that is fixed, else the first: each was a job, and planned, before one is launched."""
    trials: list[Trial] = []
    for _ in range(search.num_trials if search.is_fixed else 1):
        trials.append(propose(search, launcher, token, job_name, trials))
    return tuple(trials)


def check_budget(trials: Sequence[Trial], num_trials: int, most_usd: float | None, *, force: bool) -> None:
    """InputError where the plans of all trials together pass the budget, or know no price to hold it by.

    `force`: trials are then started for as long as their plans fit; a search that learns is judged by its first.
    """
    if most_usd is None:
        return
    unknown = next((trial for trial in trials if trial.planned_usd is None), None)
    if unknown is not None:
        raise InputError(
            f"--max-cost-usd {most_usd:g}: the plan of trial {unknown.number} knows no price (a job of this machine, "
            "or a type without one: trainyard prices show); leave it out, or give the job a machine that has a price"
        )
    total = math.fsum(trial.planned_usd or 0.0 for trial in trials) * num_trials / len(trials)
    if total > most_usd and not force:
        raise InputError(
            f"--max-cost-usd {most_usd:g}: {num_trials} trials are planned at {total:,.2f} USD; give fewer trials or "
            "more money, or --force, which starts them for as long as the money lasts (losers cost less than planned)"
        )


@dataclass
class Runner:
    """One sweep, run by this process."""

    store: SweepStore
    record: SweepRecord
    search: Search
    launcher: Launcher
    job_name: str
    say: Say
    read_only: bool = False
    """Only look: nothing is written to the sweep's record, and no job is asked to stop."""
    _places: dict[str, Place] = field(default_factory=dict)
    _courses: dict[int, Course] = field(default_factory=dict)
    _num_steps: dict[int, int] = field(default_factory=dict)
    _failed_looks: dict[int, int] = field(default_factory=dict)
    _failed_launches: dict[int, int] = field(default_factory=dict)
    _in_doubt: set[int] = field(default_factory=set)
    """Trials that may have a job: a launch of theirs got no answer, nor has any look for it since."""
    _late_looks: dict[int, int] = field(default_factory=dict)
    """At failed trials that may be started again by the tenant's resumer."""
    _held_back: str = ""

    def run(self, sleep: Callable[[], None]) -> Standings:
        """To its end; `sleep` waits between two looks. Whatever ends this process, the record has all of it."""
        self._take_up_again()
        while True:
            self._stop_losers()
            self._hold_budget()
            self._start()
            if self._is_over():
                return self.standings()
            sleep()
            self.look()

    def standings(self) -> Standings:
        """The table as of the last look."""
        speeds = {number: units_per_second(course.ordered()) for number, course in self._courses.items()}
        return standings(self.record, self._curves(), speeds)

    def look(self, *, everything: bool = False) -> None:
        """Bring states, figures and money up to date; `everything`: also of jobs that had ended."""
        for trial in self.record.trials:
            if trial.job_id is not None and (everything or not trial.is_over or trial.number in self._late_looks):
                self._look_at(trial, trial.job_id)

    def _take_up_again(self) -> None:
        """Find what a process before this one began: jobs that nobody knows the end of, or that somebody resumed; what
        was refused, or too dear, is tried anew. InputError where a budget was given that can't be held."""
        self._plan()
        for trial in self.record.trials:
            if trial.job_id is None and (trial.why or trial.state == REFUSED):
                state = WAITING if trial.state == WAITING else LAUNCHING
                self._keep(trial.model_copy(update={"state": state, "why": ""}))
        for trial in self.record.trials:
            if trial.state == LAUNCHING and trial.job_id is None:
                self._find(trial)
        self.look(everything=True)

    def _plan(self) -> None:
        """Plan what was proposed without a budget, where there is one now."""
        most = self.record.max_cost_usd
        if most is None:
            return
        trials = [trial for trial in self.record.trials if not trial.is_over or trial.job_id is None]
        trials = [trial for trial in trials if trial.state != REFUSED]
        planned = [
            trial.model_copy(update={"planned_usd": self.launcher.plan_usd(self._spec(trial))})
            if trial.planned_usd is None
            else trial
            for trial in trials
        ]
        if planned:
            # Some may run already: too small a budget stops them, where a refusal would let them run on.
            check_budget(planned, len(planned), most, force=True)
        for trial in planned:
            self._keep(trial)

    def _find(self, trial: Trial) -> None:
        """Take up the job whose launch was begun, where there is one; what can't be asked now, the launch asks."""
        try:
            found = self.launcher.find(self._spec(trial))
            if found is not None:
                self._adopt(trial, *found)
        except TrainyardError as error:
            if isinstance(error, InputError) and not _is_unanswered(error):
                self._keep(trial.model_copy(update={"state": REFUSED, "why": str(error)}))
            else:
                self.say(f"trial {trial.number}: {error}")

    def _look_at(self, trial: Trial, job_id: str) -> None:
        try:
            place = self._place(job_id)
            current = watch.status(place.store, place.backend, job_id)
        except TrainyardError as error:
            self._failed_looks[trial.number] = self._failed_looks.get(trial.number, 0) + 1
            if self._failed_looks[trial.number] >= MOST_FAILED_LOOKS:
                raise
            self.say(f"trial {trial.number}: {error}")
            return
        self._failed_looks.pop(trial.number, None)
        course = self._courses.setdefault(trial.number, Course())
        course.look(place, current.record, finished=current.finished)
        seen = self._with_figures(trial, current.record, current.state)
        self._keep(seen)
        # A job in epochs knows its steps when its data are read, and we when one has made them all.
        made = max((int(row["step"]) for row in course.ordered()), default=0) if current.state == "Completed" else 0
        self._num_steps[trial.number] = current.record.resolved.steps or made
        if current.state == "Failed" and place.has_resumer and watch.may_be_resumed(current.record):
            self._late_looks[trial.number] = self._late_looks.get(trial.number, 0) + 1
        else:
            self._late_looks.pop(trial.number, None)
        is_asked = seen.stopped_attempt == current.record.attempt.number
        if is_asked and not current.finished and current.state != "Stopping":
            self._ask_to_stop(job_id)  # whoever wrote down that it stops was gone before it was asked to

    def _place(self, job_id: str) -> Place:
        """Where it lives, asked for once; TrainyardError where that can't be told now."""
        if job_id not in self._places:
            self._places[job_id] = self.launcher.place(job_id)
        return self._places[job_id]

    def _with_figures(self, trial: Trial, record: JobRecord, state: str) -> Trial:
        """The trial as it is now."""
        known = curve(self._courses[trial.number].ordered(), self.record.metric)
        last = max(known, default=0)
        value, money = known.get(last), spent(record)
        # A job that was stopped here or failed, and that somebody resumed, runs because somebody wants it to.
        is_stopped = trial.stopped_attempt is not None and record.attempt.number <= trial.stopped_attempt
        failure = record.attempt.failure if state == "Failed" else ""
        changes = {
            "state": state,
            "step": last,
            "value": value if value is not None and math.isfinite(value) else None,
            "diverged": value is not None and not math.isfinite(value),
            "usd": None if money is None else float(money.usd),
            "why": trial.why if is_stopped else failure,
            "stopped_attempt": trial.stopped_attempt if is_stopped else None,
        }
        return trial.model_copy(update=changes)

    def _curves(self) -> dict[int, dict[int, float]]:
        return {number: curve(course.ordered(), self.record.metric) for number, course in self._courses.items()}

    def _stop_losers(self) -> None:
        running = [trial for trial in self.record.trials if trial.is_running and not trial.why]
        num_steps = max(self._num_steps.values(), default=0)
        found = losers(self.record.stop_rule, [trial.number for trial in running], self._curves(), num_steps)
        for trial in running:
            if trial.number in found:
                self._stop(trial, f"loser: {self.record.metric} {found[trial.number]}")

    def _hold_budget(self) -> None:
        """At the budget all that runs is saved and stopped, and nothing else begins."""
        most, total = self.record.max_cost_usd, self._spent_usd()
        if most is None or total < most:
            return
        words = f"{BUDGET}{total:,.2f} of {most:,.2f} USD are spent"
        for trial in self.record.trials:
            if trial.is_running and not trial.why:
                self._stop(trial, words)
            elif trial.is_waiting:
                self._keep(trial.model_copy(update={"why": words}))

    def _spent_usd(self) -> float:
        return math.fsum(trial.usd or 0.0 for trial in self.record.trials)

    def _stop(self, trial: Trial, why: str) -> None:
        assert trial.job_id is not None
        try:
            place = self._place(trial.job_id)  # not yet known where the first look at a job failed
            attempt = place.store.read(trial.job_id).record.attempt.number
        except TrainyardError as error:
            self.say(f"trial {trial.number} is to stop ({why}), and can't be asked now: {error}")
            return  # the next look finds the same reason
        # Written down first: whoever goes on with the sweep stops it then.
        self._keep(trial.model_copy(update={"why": why, "stopped_attempt": attempt}))
        self.say(f"trial {trial.number} stops: {why}")
        self._ask_to_stop(trial.job_id)

    def _ask_to_stop(self, job_id: str) -> None:
        if self.read_only:
            return
        place = self._place(job_id)
        try:
            watch.stop(place.store, place.backend, job_id)
        except InputError:
            return  # it ended meanwhile, which the next look tells
        except TrainyardError as error:
            self.say(f"{job_id} is asked to stop again at the next look: {error}")

    def _start(self) -> None:
        """Start trials as long as there are places and money."""
        while sum(trial.is_running for trial in self.record.trials) < self.record.parallel:
            trial = self._next()
            if trial is None:
                return
            if dear := self._too_dear(trial):
                if any(one.is_running for one in self.record.trials):
                    return  # they may end for less than planned
                self._keep(trial.model_copy(update={"why": dear}))
            elif not self._launch(trial):
                return

    def _next(self) -> Trial | None:
        """A trial that waits, or a new one; None where there is neither."""
        waiting = next((one for one in self.record.trials if one.is_waiting), None)
        if waiting is not None or self._all_proposed():
            return waiting
        while not self._all_proposed():
            before = self.record.trials
            trial = propose(self.search, self.launcher, self.record.token, self.job_name, before, strict=False)
            self._keep(trial)
            if trial.state != REFUSED:
                return trial
            self.say(f"trial {trial.number} is refused: {trial.why}")
        return None

    def _all_proposed(self) -> bool:
        # As the money is now, which may be more than when trials were stopped for it.
        most = self.record.max_cost_usd
        is_spent = most is not None and self._spent_usd() >= most
        is_held = any(trial.job_id is None and trial.why.startswith(BUDGET) for trial in self.record.trials)
        return len(self.record.trials) >= self.search.num_trials or is_spent or is_held

    def _too_dear(self, trial: Trial) -> str:
        """Why this trial's plan does not fit beside what is spent and what those that run may still spend."""
        most = self.record.max_cost_usd
        if most is None:
            return ""
        promised = math.fsum(
            max(one.usd or 0.0, one.planned_usd or 0.0) if one.is_running and not one.why else one.usd or 0.0
            for one in self.record.trials
        )
        if trial.planned_usd is not None and promised + trial.planned_usd <= most:
            return ""
        told = "without a known price" if trial.planned_usd is None else f"planned at {trial.planned_usd:,.2f} USD"
        return f"{BUDGET}{promised:,.2f} of {most:,.2f} USD are spent or promised; this one is {told}"

    def _launch(self, trial: Trial) -> bool:
        """Launch one; whether another may be tried at once. A refusal while others run is tried again later: mostly it
        is they that hold the quota. So is one by AWS or the network, or what got no answer: its job is looked for."""
        begun = trial.state == LAUNCHING
        self._keep(trial.model_copy(update={"state": LAUNCHING}))
        try:
            spec = self._spec(trial)
            # What was begun before may have left a job that waits to be submitted.
            found = self.launcher.find(spec) if begun else None
            self._in_doubt.discard(trial.number)  # whether there is a job has been answered
            if found is None:
                self._adopt(trial, *self.launcher.launch(spec))
            else:
                self._adopt(trial, *found)
        except TrainyardError as error:
            if _is_unanswered(error):
                self._in_doubt.add(trial.number)
            if _is_unanswered(error) or not isinstance(error, InputError):
                failures = self._failed_launches[trial.number] = self._failed_launches.get(trial.number, 0) + 1
                if failures < MOST_FAILED_LAUNCHES:
                    self.say(f"trial {trial.number} is tried again: {error}")
                    return False
            return self._given_up(trial, error)
        self._failed_launches.pop(trial.number, None)
        return True

    def _adopt(self, trial: Trial, place: Place, record: JobRecord) -> None:
        """That job is this trial's; it is submitted where it was only written down."""
        if record.attempt.submitted_at is None:
            seen = watch.status(place.store, place.backend, record.job_id)
            # It runs where it was taken and the answer lost.
            record = seen.record
            if seen.observation is None:
                record = watch.resume(place.store, place.backend, record.job_id, say=self.say)
        self._places[record.job_id], self._held_back = place, ""
        self._keep(trial.model_copy(update={"state": record.state, "job_id": record.job_id}))
        self.say(f"trial {trial.number} of {self.search.num_trials}: {record.job_id} ({' '.join(trial.overrides)})")

    def _given_up(self, trial: Trial, error: TrainyardError) -> bool:
        if not any(one.is_running for one in self.record.trials):
            state, told = REFUSED, f"is refused: {error}"
            if trial.number in self._in_doubt:
                again = (
                    f"`trainyard sweep --resume {self.record.name}` looks for its job, and launches it if there is none"
                )
                state, told = UNANSWERED, f"is left without an answer: {error}; {again}"
            self._keep(trial.model_copy(update={"state": state, "why": str(error)}))
            self.say(f"trial {trial.number} {told}")
            return True
        if str(error) != self._held_back:
            self._held_back = str(error)
            self.say(f"trial {trial.number} waits: {error}")
        return False

    def _spec(self, trial: Trial) -> JobSpec:
        return self.launcher.load(trial.name, trial.overrides)

    def _keep(self, trial: Trial) -> None:
        changed = self.record.with_trial(trial)
        if changed != self.record:
            self.record = changed
            if not self.read_only:
                self.store.write(changed)

    def _is_over(self) -> bool:
        is_awaited = any(looks <= LATE_LOOKS for looks in self._late_looks.values())
        return self._all_proposed() and all(trial.is_over for trial in self.record.trials) and not is_awaited
