"""The training loop, written once: it never asks which engine runs, where data lies or how a checkpoint is stored."""

from enum import Enum

from trainer.session import Session


class Outcome(Enum):
    """How a run of the loop ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    """Asked to stop; progress is saved and the job wants to be resumed."""


def train(session: Session) -> Outcome:
    """Optimizer steps from where the session stands to the job's last, or to the step at which it is asked to stop."""
    strategy, clock = session.strategy, session.clock
    if not session.make_up_validation():
        return Outcome.INTERRUPTED  # the step is saved already
    while session.step < session.num_steps:
        step = session.step + 1
        with clock("data"):
            batch = session.next_batch()
        loss_sum = strategy.forward_backward(batch.local, batch.num_targets, clock)
        session.tell(step, loss_sum)
        with clock("optimizer"):
            learning_rate = session.learning_rate(step)
            update = strategy.optimizer_step(learning_rate, session.anomalies.gate(loss_sum, batch.num_targets))
        loss, request = session.end_step(step, batch, update)
        step_seconds, breakdown = clock.finish_row()
        if session.anomalies.wants_rollback:
            session.roll_back()
            continue

        session.step = step
        validation, request = session.validate(request)
        session.record(batch, loss, learning_rate, update, step_seconds, breakdown, validation)

        if session.is_checkpoint_due() or request != "none":
            with clock("checkpoint"):
                session.save()
        if request == "save_and_exit" and step < session.num_steps:
            return Outcome.INTERRUPTED
    return Outcome.COMPLETED
