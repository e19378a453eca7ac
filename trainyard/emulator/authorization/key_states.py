"""What KMS refuses for the state that a key is in, whoever asks (KMS developer guide, "Key states of AWS KMS keys").

moto keeps the state and works on with the key: what is said to be shredded could be read.
"""

from collections.abc import Callable, Iterable

from trainyard.emulator.authorization.actions import Check
from trainyard.emulator.authorization.requests import AwsRequest


def _actions(names: str) -> frozenset[str]:
    return frozenset(f"kms:{name}" for name in names.split())


_USES = _actions(
    "Decrypt Encrypt GenerateDataKey GenerateDataKeyWithoutPlaintext ReEncryptFrom ReEncryptTo CreateGrant "
    "EnableKeyRotation"
)
"""Only with a key that is Enabled."""
_CHANGES = _actions(
    "EnableKey DisableKey ScheduleKeyDeletion DisableKeyRotation GetKeyRotationStatus TagResource UntagResource "
    "UpdateKeyDescription"
)
"""Not with one that awaits its deletion."""


def refusal(request: AwsRequest, checks: Iterable[Check], state_of: Callable[[str], str | None]) -> tuple[str, str]:
    """Code and message where a key that an allowed request needs can't serve it; empty texts where all can.

    S3 passes on what KMS tells it, with a prefix (localstack#7786 has its answers from AWS).
    """
    prefix = "" if request.service == "kms" else "KMS."
    for check in checks:
        code, message = (
            _wrong(check, state_of(check.resource)) if check.resource.startswith("arn:aws:kms:") else ("", "")
        )
        if code:
            return prefix + code, message
    return "", ""


def _wrong(check: Check, state: str | None) -> tuple[str, str]:
    if state is None:
        return "NotFoundException", f"Key '{check.resource}' does not exist"
    if state == "PendingDeletion" and check.action in _USES | _CHANGES:
        return "KMSInvalidStateException", f"{check.resource} is pending deletion."
    if state != "Enabled" and check.action in _USES:
        return "DisabledException", f"{check.resource} is disabled."
    if state != "PendingDeletion" and check.action == "kms:CancelKeyDeletion":
        return "KMSInvalidStateException", f"{check.resource} is not pending deletion."
    return "", ""
