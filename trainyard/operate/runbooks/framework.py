"""What every runbook is made of: findings with what decided them, steps that are printed or made, and one report.

Exit codes: 0, nothing is wrong (diagnosing), or all steps are made or only printed (acting); 1, the runbook's fault is
there, or a step failed; 2, the input was wrong; 3, AWS refused. What fails once a step that changes something was begun
is 1 whoever refused it, as a refused one may have been made in part, and the steps are printed.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from trainyard.errors import AwsRefusedError, InputError, JobFailedError, TrainyardError
from trainyard.launch.aws import aws_errors
from trainyard.launch.session import Account, checkout_root, state_root
from trainyard.spec.checkpoint_names import why_not_here

Say = Callable[[str], None]
Kind = Literal["fault", "neighbour", "clear", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One thing that a runbook says."""

    kind: Kind
    """fault: what this runbook is for is there; neighbour: something else is, which another runbook looks into; clear:
    it was looked for and is not there; unknown: it could not be looked for."""
    words: str
    decided_by: tuple[str, ...] = ()
    """The lines or figures on which it rests; each is in the evidence folder."""
    then: tuple[str, ...] = ()
    """Commands to go on with, as they are typed."""

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.kind}: {self.words}"]
        lines += [f"  because: {line}" for line in self.decided_by]
        return lines + [f"  next: {command}" for command in self.then]


@dataclass
class Step:
    """One call that changes something, or a command that does."""

    words: str
    """The exact call, as somebody would type it."""
    make: Callable[[], str] = field(repr=False)
    """Makes it; what it answered, in a line. TrainyardError where it failed: later steps are not made."""
    changes: bool = True
    """False: it only looks, and is made in a dry run too."""


@dataclass
class Report:
    """What a runbook found and did."""

    runbook: str
    subject: str
    """The job or tenant."""
    folder: Path
    """Of the evidence."""
    findings: list[Finding] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Each with `call`, `made` and `answer`."""
    may_have_changed: bool = False
    """Whether a step that changes something was begun: one that was refused half-way has changed something, too."""
    error: TrainyardError | None = None
    """What ended it early."""

    @property
    def exit_code(self) -> int:
        """1 where the runbook's own fault is there, or something failed once a change was begun; else the error's."""
        if self.error is not None and not self.may_have_changed:
            return self.error.exit_code
        return 1 if self.error is not None or any(one.kind == "fault" for one in self.findings) else 0

    @property
    def has_found(self) -> bool:
        """Whether there is something to tell beside what ended it early."""
        return bool(self.findings) or any(step["answer"] for step in self.steps)

    def document(self) -> dict[str, Any]:
        """As JSON; it is also report.json of the evidence folder."""
        return {
            "runbook": self.runbook,
            "subject": self.subject,
            "evidence": str(self.folder),
            "findings": [asdict(one) for one in self.findings],
            "steps": self.steps,
            "exit_code": self.exit_code,
            **({"error": str(self.error)} if self.error is not None else {}),
        }

    def lines(self) -> list[str]:
        """For people."""
        lines = [line for one in self.findings for line in one.lines()]
        for step in self.steps:
            unmade = "failed" if self.may_have_changed or self.error is not None else "would run"
            lines.append(f"{'made' if step['made'] else unmade}: {step['call']}")
            lines += [f"  {line}" for line in step["answer"].splitlines()]
        if not self.may_have_changed and self.error is None and any(not step["made"] for step in self.steps):
            lines.append("nothing was changed; --yes makes these calls")
        return [*lines, f"evidence: {self.folder}"]


def evidence_folder(runbook: str, chosen: Path | None) -> Path:
    """The folder that keeps what a runbook saw: the chosen one, or a new one under the state directory. InputError
    where nothing can be written there, which must not turn out after the steps."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    # By all its folders: steps name it to commands that run in the checkout's folder.
    parent = (state_root() / "runbooks").absolute()
    folder = chosen.absolute() if chosen is not None else parent / f"{runbook}-{stamp}"
    number = 1
    while chosen is None and folder.exists():
        number += 1
        folder = parent / f"{runbook}-{stamp}-{number}"
    if chosen is not None and (why := why_not_here(chosen)) is not None:
        raise InputError(f"--evidence {chosen}: {why}")
    try:
        # Lines of a job and roles' names: the caller's alone.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"--evidence {folder}: can't be made ({error.strerror}); give another folder") from None
    try:
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"evidence")
    except OSError as error:
        raise InputError(f"--evidence {folder}: takes no file ({error.strerror}); give another folder") from None
    return folder


def keep(folder: Path, name: str, content: Any) -> None:
    """Write one piece of evidence: text as it is, all else as JSON."""
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content, indent=1, default=str) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _takes_no(folder, name, error) from None


def keep_copy(folder: Path, name: str, source: Path) -> None:
    """Keep a file, or a folder with all its files, as a piece of evidence."""
    try:
        if source.is_dir():
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, folder / name)
    except OSError as error:
        raise _takes_no(folder, name, error) from None


def _takes_no(folder: Path, name: str, error: OSError) -> InputError:
    # A tree's error has no word of the system's: it lists each file with its own.
    reason = error.strerror or next((str(failed[2]) for failed in error.args[0]), "")
    return InputError(f"--evidence {folder}: {name} can't be written ({reason}); give another folder")


def perform(report: Report, steps: Sequence[Step], *, dry_run: bool, say: Say) -> None:
    """Make the steps in order, or only write down what they would be; stops at the first that fails."""
    for step in steps:
        made = not (dry_run and step.changes)
        entry = {"call": step.words, "made": False, "answer": ""}
        report.steps.append(entry)
        if made:
            say(step.words)
            report.may_have_changed |= step.changes
            try:
                entry["answer"] = step.make()
            except TrainyardError as error:
                entry["answer"] = "\n".join(getattr(error, "__notes__", ()))
                raise
            entry["made"] = True
    keep(report.folder, "steps.json", report.steps)


def trainyard_command(*arguments: str) -> tuple[str, ...]:
    """`trainyard ...` as this checkout's own interpreter runs it."""
    return (sys.executable, "-m", "trainyard", *arguments)


def command(*arguments: str, changes: bool = True, run: Callable[[Sequence[str]], str] | None = None) -> Step:
    """A step that is a `trainyard` verb, or a script of scripts/ where the first word is a path of one.

    One that only looks answers with all that it prints, which is what it is made for; else the last line tells."""
    is_script = arguments[0].startswith("scripts/")
    argv = (str(checkout_root() / arguments[0]), *arguments[1:]) if is_script else trainyard_command(*arguments)
    words = shlex.join(arguments if is_script else ("trainyard", *arguments))

    def make() -> str:
        said = (run or _run)(argv)
        return said.rpartition("\n")[2].strip() if changes else said

    return Step(words, make, changes=changes)


def _run(argv: Sequence[str]) -> str:
    """What the command printed; its own one-line error where it fails, with all that it printed before as a note: of a
    check that fails without an error (the doctor, the proof of isolation) that is what it found."""
    # It runs in the checkout's folder, from where a relative one would be another.
    told = {**os.environ, "TRAINYARD_STATE_DIR": str(state_root().absolute())}
    done = subprocess.run(argv, cwd=checkout_root(), env=told, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return done.stdout.strip()
    said = [line for line in done.stderr.splitlines() if line.strip()]
    ended = f"a check failed, exit code {done.returncode} (what it found stands under its call): {shlex.join(argv)}"
    last = said[-1].strip().removeprefix("trainyard: ") if said else ended
    kinds: dict[int, type[TrainyardError]] = {2: InputError, 3: AwsRefusedError}
    error = kinds.get(done.returncode, JobFailedError)(last)
    if done.stdout.strip():
        error.add_note(done.stdout.strip())
    raise error


def call(account: Account, service: str, operation: str, **parameters: Any) -> Step:
    """A step that is one call of AWS, printed as the AWS CLI has it."""

    def make() -> str:
        with aws_errors(f"{service}:{operation}", str(next(iter(parameters.values()), ""))):
            answer = getattr(account.client(service), operation)(**parameters)
        kept = {name: value for name, value in answer.items() if name != "ResponseMetadata"}
        return json.dumps(kept, default=str) if kept else "done"

    return Step(call_words(account, service, operation, **parameters), make)


def call_words(account: Account, service: str, operation: str, **parameters: Any) -> str:
    """One call of AWS as the AWS CLI has it."""
    options = " ".join(f"--{_dashed(name)} {_quoted(value)}" for name, value in parameters.items())
    if service not in ("iam", "sts"):  # which are of no region; another one's service knows nothing of a key here
        options += f" --region {account.session.region_name}"
    named = {"s3": "s3api"}.get(service, service)
    return f"aws {named} {operation.replace('_', '-')} {options}".strip()


def _dashed(name: str) -> str:
    """`KeyId` -> `key-id`."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


def _quoted(value: Any) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value, default=str))
