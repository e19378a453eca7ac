"""Several backends behind one door: each job goes to the one that its record names."""

from collections.abc import Mapping, Sequence

from trainyard.errors import InputError
from trainyard.launch.backend import Backend, LogCursor, LogLine, Observation, Say
from trainyard.launch.record import JobRecord


class ByRecord:
    """The backends of one place, by the word in a job's record."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = dict(backends)

    def _of(self, record: JobRecord) -> Backend:
        if record.backend not in self._backends:
            has = ", ".join(sorted(self._backends))
            owner = f"tenant {record.tenant}" if record.environment else "this machine"
            raise InputError(
                f"job {record.job_id}: ran on {record.backend}, which {owner} no longer has (it has: {has})"
            )
        return self._backends[record.backend]

    def check(self, record: JobRecord) -> None:
        """See Backend."""
        self._of(record).check(record)

    def submit(self, record: JobRecord, say: Say) -> str | None:
        """See Backend."""
        return self._of(record).submit(record, say)

    def observe(self, record: JobRecord) -> Observation | None:
        """See Backend."""
        return self._of(record).observe(record)

    def stop(self, record: JobRecord) -> None:
        """See Backend."""
        self._of(record).stop(record)

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """See Backend."""
        return self._of(record).read_logs(record, cursor)

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """Each backend is asked once, about its own; one that is gone knows of none."""
        found: dict[str, str] = {}
        for name, backend in self._backends.items():
            found |= backend.states([record for record in records if record.backend == name])
        return found
