"""Who calls: the account's root, or a role through a session. There is nobody else."""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ministack.core.iam_evaluator import EvalContext, evaluate_resource_policy

from trainyard.emulator.authorization.policies import as_text, sound_resource_policy


class UnknownCallerError(Exception):
    """No key, a key that nobody has, or an expired session. `code` is AWS's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Principal:
    """A caller. The root has no role and may do everything."""

    account: str
    session_arn: str
    """What a denial names: arn:aws:sts::ACCOUNT:assumed-role/ROLE/SESSION, or the root's ARN."""
    role: Any = None
    """moto's role."""
    session_policy: str = ""
    session_name: str = ""

    @property
    def is_root(self) -> bool:
        """Whether this is the account's root."""
        return self.role is None

    @property
    def arn(self) -> str:
        """aws:PrincipalArn, and what resource policies name: for a session the role's ARN, path included."""
        return str(self.role.arn) if self.role is not None else self.session_arn


@dataclass(frozen=True)
class Session:
    """Temporary credentials of a role."""

    access_key_id: str
    secret_access_key: str
    session_token: str


class Principals:
    """Access keys to principals; roles that services assume."""

    def __init__(self, account: str, admin_access_key_id: str) -> None:
        self.account = account
        self._admin = admin_access_key_id
        self._root = Principal(account, f"arn:aws:iam::{account}:root")
        self._sessions: dict[str, Any] = {}
        self.service_job_tags: Callable[[str], Mapping[str, str]] = lambda _: {}
        """Of a job in a training queue, by its ARN; the server knows them."""

    def resolve(self, access_key_id: str, session_token: str) -> Principal:
        """The caller with that key; UnknownCallerError when there is none, or the session is over."""
        if access_key_id == self._admin:
            return self._root
        if not access_key_id:
            raise UnknownCallerError("MissingAuthenticationToken", "the request is not signed")
        session = self._session(access_key_id)
        if session is None:
            raise UnknownCallerError("InvalidClientTokenId", "The security token included in the request is invalid.")
        if session_token != session.session_token:
            raise UnknownCallerError("InvalidClientTokenId", "The security token included in the request is invalid.")
        if session.expiration < datetime.datetime.now(datetime.UTC).replace(tzinfo=session.expiration.tzinfo):
            raise UnknownCallerError("ExpiredToken", "The security token included in the request is expired")
        role = self.role(session.role_arn)
        if role is None:
            raise UnknownCallerError("InvalidClientTokenId", "The role of this session does not exist any more.")
        return Principal(self.account, session.arn, role, session.policy or "", session.session_name)

    def _session(self, access_key_id: str) -> Any:
        """moto's assumed role of a key; it keeps a list, so found ones are remembered."""
        from moto.sts.models import sts_backends

        if access_key_id not in self._sessions:
            for session in reversed(list(sts_backends[self.account]["aws"].assumed_roles)):
                if session.access_key_id == access_key_id:
                    self._sessions[access_key_id] = session
                    break
        return self._sessions.get(access_key_id)

    def role(self, arn: str) -> Any:
        """moto's role with that exact ARN, or None."""
        return next((role for role in list(self._iam().roles.values()) if role.arn == arn), None)

    def role_arn(self, name: str) -> str:
        """The ARN of the role called `name`, with its path; a role that doesn't exist gets the ARN it would have."""
        role = next((role for role in list(self._iam().roles.values()) if role.name == name), None)
        return str(role.arn) if role is not None else f"arn:aws:iam::{self.account}:role/{name}"

    def managed_policies(self) -> Any:
        """ARN to managed policy."""
        return self._iam().managed_policies

    def _iam(self) -> Any:
        from moto.iam.models import iam_backends

        return iam_backends[self.account]["aws"]

    def key_arn(self, given: str, region: str) -> str:
        """The ARN of a KMS key from its id, alias or ARN. An unknown one gets an ARN that no policy names."""
        from moto.kms.models import kms_backends

        backend = kms_backends[self.account][region]
        name = given.rpartition(":alias/")[2] if ":alias/" in given else given.removeprefix("alias/")
        if given.startswith("alias/") or ":alias/" in given:
            key_id = backend.get_key_id_from_alias(f"alias/{name}")
        else:
            key_id = given.rpartition("/")[2]
        if key_id and key_id in backend.keys:
            return str(backend.keys[key_id].arn)
        return given if given.startswith("arn:") else f"arn:aws:kms:{region}:{self.account}:key/{key_id or given}"

    def key_state(self, arn: str) -> str | None:
        """KMS's KeyState of a key of this account; None: it has no such key."""
        from moto.kms.models import kms_backends

        parts = arn.split(":")
        key = kms_backends[self.account][parts[3]].keys.get(arn.rpartition("/")[2])
        return str(key.key_state) if key is not None and key.arn == arn else None

    def trusts_service(self, role: Any, service: str, source_arn: str) -> bool:
        """Whether a role's trust policy lets `service` assume it for the resource `source_arn` of this account."""
        context = EvalContext(
            principal_arn="",
            principal_type="AWSService",
            principal_account="",
            action="sts:AssumeRole",
            resource_arn=role.arn,
            region="",
            secure_transport=True,
            service_context={
                "aws:sourceaccount": self.account,
                "aws:sourcearn": source_arn,
                "aws:principalisawsservice": "true",
                "aws:principalservicename": service,
            },
        )
        trust = sound_resource_policy(as_text(role.assume_role_policy_document))
        return bool(evaluate_resource_policy(trust, context, service=service).decision == "Allow")

    def assume_for_service(
        self, role_arn: str, service: str, *, source_arn: str, session_name: str, region: str
    ) -> Session | None:
        """A session of the role for `service`, or None when the role is missing or doesn't trust the service."""
        from moto.sts.models import sts_backends

        role = self.role(role_arn)
        if role is None or not self.trusts_service(role, service, source_arn):
            return None
        session = sts_backends[self.account]["aws"].assume_role(
            region_name=region,
            role_session_name=session_name[:64],
            role_arn=role_arn,
            policy="",
            duration=12 * 3600,
            external_id="",
        )
        return Session(session.access_key_id, session.secret_access_key, session.session_token)
