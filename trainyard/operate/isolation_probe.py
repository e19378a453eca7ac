"""One tenant's role really tries to reach another tenant's things, through the AWS API, and must be refused.

The proof over all principals and actions is another tool's work; this is the demonstration that a person can watch:
each attempt is a real request, each refusal the answer of the deployed policies. The owner makes the same read calls
as controls, because a deny-all would refuse everything too.
"""

from dataclasses import dataclass
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError

from trainyard.errors import JobFailedError
from trainyard.launch.aws import DENIED_CODES
from trainyard.launch.session import Account
from trainyard.spec.platform import TenantContract


@dataclass(frozen=True)
class Attempt:
    """One try and its outcome."""

    principal: str
    action: str
    resource: str
    denied: bool
    detail: str
    """What AWS answered."""

    @property
    def reason(self) -> str:
        """AWS's answer without the names: the policy type that decided."""
        return self.detail.partition(" because ")[2] or self.detail

    def __str__(self) -> str:
        outcome = "denied" if self.denied else "ALLOWED"
        return f"{self.principal}: {self.action} on {self.resource}: {outcome} ({self.detail})"


@dataclass(frozen=True)
class ProbeResult:
    """All attempts of the intruder, and the owner's controls."""

    attempts: tuple[Attempt, ...]
    controls: tuple[Attempt, ...]

    @property
    def num_denied(self) -> int:
        """Attempts that were refused."""
        return sum(attempt.denied for attempt in self.attempts)

    @property
    def passed(self) -> bool:
        """Every attempt refused and every control allowed."""
        return self.num_denied == len(self.attempts) and not any(control.denied for control in self.controls)


def probe(
    *,
    intruder: Account,
    intruder_contract: TenantContract,
    owner: Account,
    owner_contract: TenantContract,
    checkpoint_key: str,
    job_id: str,
) -> ProbeResult:
    """`intruder` (AWS as one tenant's launcher) tries the owner's checkpoint, keys, data, contract, job and roles.

    `checkpoint_key` is an object key that exists in the owner's checkpoint bucket, `job_id` one of the owner's jobs.
    """
    # What the intruder would decrypt had it got hold of it. Under the data key: a launcher only reads checkpoints.
    key_id = owner_contract.keys.data
    ciphertext = owner.client("kms").generate_data_key(KeyId=key_id, KeySpec="AES_256")["CiphertextBlob"]
    intruding = _Caller(intruder, intruder_contract, owner_contract)
    owning = _Caller(owner, owner_contract, owner_contract)
    return ProbeResult(
        attempts=(
            *intruding.reads(checkpoint_key, ciphertext, job_id),
            *intruding.writes(checkpoint_key, job_id),
            *intruding.impersonations(),
        ),
        controls=owning.reads(checkpoint_key, ciphertext, job_id),
    )


class _Caller:
    """One principal at work on the target tenant."""

    def __init__(self, account: Account, own: TenantContract, target: TenantContract) -> None:
        self._account = account
        self._who = own.roles.launcher.rsplit("/", 1)[-1]
        self._target = target

    def reads(self, checkpoint_key: str, ciphertext: bytes, job_id: str) -> tuple[Attempt, ...]:
        """Calls that change nothing, so that the owner may make them too."""
        bucket, data, keys = self._target.buckets.checkpoints, self._target.buckets.data, self._target.keys
        parameter = f"/trainyard/{self._target.environment}/{self._target.tenant}/contract"
        return (
            self._try("s3:GetObject", f"{bucket}/{checkpoint_key}", Bucket=bucket, Key=checkpoint_key),
            self._try("kms:Decrypt", keys.data, KeyId=keys.data, CiphertextBlob=ciphertext),
            self._try("s3:ListObjectsV2", bucket, Bucket=bucket),
            self._try("s3:ListObjectsV2", data, Bucket=data),
            self._try("s3:ListObjectsV2", self._target.buckets.artifacts, Bucket=self._target.buckets.artifacts),
            self._try("kms:GenerateDataKey", keys.data, KeyId=keys.data, KeySpec="AES_256"),
            self._try("ssm:GetParameter", parameter, Name=parameter),
            self._try("sagemaker:DescribeTrainingJob", job_id, TrainingJobName=job_id),
        )

    def writes(self, checkpoint_key: str, job_id: str) -> tuple[Attempt, ...]:
        """Calls that would destroy or plant something."""
        bucket, keys = self._target.buckets.checkpoints, self._target.keys
        return (
            self._try("kms:GenerateDataKey", keys.checkpoints, KeyId=keys.checkpoints, KeySpec="AES_256"),
            self._try("s3:PutObject", f"{bucket}/intruder", Bucket=bucket, Key="intruder", Body=b"x"),
            self._try("s3:DeleteObject", f"{bucket}/{checkpoint_key}", Bucket=bucket, Key=checkpoint_key),
            self._try("sagemaker:StopTrainingJob", job_id, TrainingJobName=job_id),
        )

    def impersonations(self) -> tuple[Attempt, ...]:
        """Becoming one of the target's roles."""
        roles = self._target.roles
        return tuple(
            self._try("sts:AssumeRole", role, RoleArn=role, RoleSessionName="intruder")
            for role in (roles.launcher, roles.job, roles.auditor)
        )

    def _try(self, action: str, resource: str, **parameters: Any) -> Attempt:
        service, _, operation = action.partition(":")
        client = self._account.client(service)
        try:
            getattr(client, xform_name(operation))(**parameters)
        except ClientError as error:
            code = str(error.response["Error"].get("Code", ""))
            if code not in DENIED_CODES:
                # A missing bucket or a broken endpoint refuses too; that must never count as isolation.
                raise JobFailedError(
                    f"isolation probe: {action} on {resource} failed with {code}, which is no decision: {error}"
                ) from error
            detail = str(error.response["Error"].get("Message", code))
            return Attempt(self._who, action, resource, denied=True, detail=detail)
        return Attempt(self._who, action, resource, denied=False, detail="the call succeeded")
