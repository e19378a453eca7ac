"""S3: actions, resources, condition keys, and the KMS use that an encrypted object implies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from trainyard.emulator.authorization.actions import Check, KeyLookup, UnmappedError
from trainyard.emulator.authorization.requests import AwsRequest, decode_plus

# Only operations that moto has: for any other it would fall through to the plain one, such as GetObject.
_OBJECT = {
    ("GET", ""): "GetObject",
    ("HEAD", ""): "GetObject",
    ("PUT", ""): "PutObject",
    ("DELETE", ""): "DeleteObject",
    ("POST", "uploads"): "PutObject",
    ("POST", "uploadId"): "PutObject",
    ("PUT", "uploadId"): "PutObject",
    ("GET", "uploadId"): "ListMultipartUploadParts",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "tagging"): "GetObjectTagging",
    ("PUT", "tagging"): "PutObjectTagging",
    ("DELETE", "tagging"): "DeleteObjectTagging",
    ("GET", "acl"): "GetObjectAcl",
    ("PUT", "acl"): "PutObjectAcl",
    ("GET", "attributes"): "GetObjectAttributes",
    ("PUT", "retention"): "PutObjectRetention",
    ("GET", "legal-hold"): "GetObjectLegalHold",
    ("PUT", "legal-hold"): "PutObjectLegalHold",
    ("POST", "restore"): "RestoreObject",
}
_VERSIONED = {
    "GetObject": "GetObjectVersion",
    "DeleteObject": "DeleteObjectVersion",
    "GetObjectTagging": "GetObjectVersionTagging",
    "PutObjectTagging": "PutObjectVersionTagging",
    "DeleteObjectTagging": "DeleteObjectVersionTagging",
    "GetObjectAcl": "GetObjectVersionAcl",
    "PutObjectAcl": "PutObjectVersionAcl",
    "GetObjectAttributes": "GetObjectVersionAttributes",
}
_SAME_FOR_A_VERSION = ("PutObjectRetention", "GetObjectLegalHold", "PutObjectLegalHold", "RestoreObject")
_BUCKET = {
    ("GET", ""): "ListBucket",
    ("HEAD", ""): "ListBucket",
    ("PUT", ""): "CreateBucket",
    ("DELETE", ""): "DeleteBucket",
    ("POST", "delete"): "DeleteObject",
    ("GET", "list-type"): "ListBucket",
    ("GET", "versions"): "ListBucketVersions",
    ("GET", "uploads"): "ListBucketMultipartUploads",
    ("GET", "location"): "GetBucketLocation",
    ("GET", "policy"): "GetBucketPolicy",
    ("PUT", "policy"): "PutBucketPolicy",
    ("DELETE", "policy"): "DeleteBucketPolicy",
    ("GET", "policyStatus"): "GetBucketPolicyStatus",
    ("GET", "versioning"): "GetBucketVersioning",
    ("PUT", "versioning"): "PutBucketVersioning",
    ("GET", "encryption"): "GetEncryptionConfiguration",
    ("PUT", "encryption"): "PutEncryptionConfiguration",
    ("DELETE", "encryption"): "PutEncryptionConfiguration",
    ("GET", "lifecycle"): "GetLifecycleConfiguration",
    ("PUT", "lifecycle"): "PutLifecycleConfiguration",
    ("DELETE", "lifecycle"): "PutLifecycleConfiguration",
    ("GET", "tagging"): "GetBucketTagging",
    ("PUT", "tagging"): "PutBucketTagging",
    ("DELETE", "tagging"): "PutBucketTagging",
    ("GET", "publicAccessBlock"): "GetBucketPublicAccessBlock",
    ("PUT", "publicAccessBlock"): "PutBucketPublicAccessBlock",
    ("GET", "ownershipControls"): "GetBucketOwnershipControls",
    ("PUT", "ownershipControls"): "PutBucketOwnershipControls",
    ("GET", "acl"): "GetBucketAcl",
    ("PUT", "acl"): "PutBucketAcl",
    ("GET", "logging"): "GetBucketLogging",
    ("PUT", "logging"): "PutBucketLogging",
    ("GET", "notification"): "GetBucketNotification",
    ("PUT", "notification"): "PutBucketNotification",
    ("GET", "cors"): "GetBucketCORS",
    ("GET", "object-lock"): "GetBucketObjectLockConfiguration",
}
# Query parameters that choose another operation; every other one (prefix, partNumber, x-id ...) refines the same one.
_SELECTORS = frozenset(name for _, name in (*_OBJECT, *_BUCKET) if name) | frozenset(
    [
        "accelerate",
        "analytics",
        "intelligent-tiering",
        "inventory",
        "metrics",
        "replication",
        "requestPayment",
        "select",
        "select-type",
        "torrent",
        "website",
        "metadataTable",
        "session",
    ]
)
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# As SDKs write it: what could end a path, an unencoded ; # or ?, only where it does.
_COPY_SOURCE = re.compile(
    r"/?([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([A-Za-z0-9%._~!*'()+,:@&=$/-]+)(?:\?versionId=([\w.-]+))?"
)
_XML_DECLARATION = re.compile(r"""\A<\?xml version=["']1\.0["']( encoding=["']UTF-8["'])?\s*\?>""", re.I)
_RIGHTS_OF_HEADERS = {
    "x-amz-tagging": "s3:PutObjectTagging",
    "x-amz-acl": "s3:PutObjectAcl",
    "x-amz-object-lock-mode": "s3:PutObjectRetention",
    "x-amz-object-lock-retain-until-date": "s3:PutObjectRetention",
    "x-amz-object-lock-legal-hold": "s3:PutObjectLegalHold",
    "x-amz-bypass-governance-retention": "s3:BypassGovernanceRetention",
}
"""Headers by which a request does more than its own action says."""


@dataclass(frozen=True)
class Encryption:
    """How an object is, or will be, encrypted with KMS."""

    key: str
    bucket_key: bool


class S3State:
    """What moto's S3 knows that a decision depends on."""

    def __init__(self, account: str) -> None:
        self._account = account

    def bucket(self, name: str) -> Any:
        """moto's bucket, or None."""
        from moto.s3.models import s3_backends

        return s3_backends[self._account]["aws"].buckets.get(name)

    def key_of_upload(self, bucket_name: str, upload_id: str) -> str | None:
        """The key of a multipart upload that goes on in the bucket, or None."""
        bucket = self.bucket(bucket_name)
        upload = bucket.multiparts.get(upload_id) if bucket is not None else None
        return None if upload is None else str(upload.key_name)

    def holds(self, bucket_name: str, key: str) -> bool:
        """Whether the bucket has an object of that key, and no marker that it was deleted."""
        from moto.s3.models import FakeKey

        bucket = self.bucket(bucket_name)
        return bucket is not None and isinstance((bucket.keys.getlist(key, []) or [None])[-1], FakeKey)

    def encryption_of(self, bucket_name: str, key: str, version: str | None) -> Encryption | None:
        """The KMS encryption of a stored object; None: not stored, or not by KMS."""
        bucket = self.bucket(bucket_name)
        if bucket is None:
            return None
        stored = [item for item in bucket.keys.getlist(key, []) if version is None or str(item.version_id) == version]
        if not stored:
            return None
        item = stored[-1]
        encryption = getattr(item, "encryption", None)
        if encryption is None:
            return self.default_encryption(bucket_name)
        if not str(encryption).startswith("aws:kms"):
            return None
        return Encryption(
            getattr(item, "kms_key_id", None) or "alias/aws/s3", _true(getattr(item, "bucket_key_enabled", False))
        )

    def default_encryption(self, bucket_name: str) -> Encryption | None:
        """The bucket's default, where it is KMS."""
        bucket = self.bucket(bucket_name)
        rule = (bucket.encryption or {}).get("Rule") if bucket is not None else None
        rule = rule[0] if isinstance(rule, list) else rule
        if not rule:
            return None
        default = rule.get("ApplyServerSideEncryptionByDefault") or {}
        if not str(default.get("SSEAlgorithm", "")).startswith("aws:kms"):
            return None
        return Encryption(default.get("KMSMasterKeyID") or "alias/aws/s3", _true(rule.get("BucketKeyEnabled", False)))


def _true(value: Any) -> bool:
    return str(value).lower() == "true"


def checks_for(request: AwsRequest, state: S3State, key_arn: KeyLookup) -> list[Check]:
    """Everything that an S3 request must be allowed, KMS included; UnmappedError where that can't be told."""
    bucket, _, key = request.path.lstrip("/").partition("/")
    if not bucket:
        if request.method == "GET":
            return [Check("s3:ListAllMyBuckets", "*")]
        raise UnmappedError(
            f"s3: {request.method} {request.path}: the emulator's authorizer doesn't know this operation"
        )
    if not _BUCKET_NAME.fullmatch(bucket):
        raise UnmappedError(f"s3: the emulator's authorizer doesn't take {bucket!r} for the name of a bucket")
    selectors = _selectors(request)
    action = _action(request, key, selectors)
    context = _context(request, bucket)
    if "delete" in selectors:
        return _deletions(request, bucket, context)
    checks = [Check(f"s3:{action}", _arn(bucket, key) if key else f"arn:aws:s3:::{bucket}", context)]
    if key:
        _require_own_upload(request, bucket, key, state)
        checks += _object_extras(request, bucket, key, action, selectors, context, state, key_arn)
    elif request.method == "PUT" and not selectors:
        checks += [
            Check(right, f"arn:aws:s3:::{bucket}", context)
            for name, right in _RIGHTS_OF_NEW_BUCKETS.items()
            if any(header.startswith(name) for header in request.headers)
        ]
    return checks


_RIGHTS_OF_NEW_BUCKETS = {
    "x-amz-acl": "s3:PutBucketAcl",
    "x-amz-grant-": "s3:PutBucketAcl",
    "x-amz-object-ownership": "s3:PutBucketOwnershipControls",
    "x-amz-bucket-object-lock-enabled": "s3:PutBucketObjectLockConfiguration",
}


def _selectors(request: AwsRequest) -> list[str]:
    """The query parameter that chooses the operation: at most one, as moto may look for them in another order."""
    selectors = [name for name in request.query if name in _SELECTORS]
    if len(selectors) > 1:
        raise UnmappedError(f"s3: {request.method} ?{'&'.join(selectors)} asks for more than one operation")
    if selectors == ["uploadId"]:
        needed = ("uploadId", "partNumber") if request.method == "PUT" else ("uploadId",)
        empty = [name for name in needed if not request.query.get(name, [""])[0]]
        if empty:
            raise UnmappedError(f"s3: {request.method} ?uploadId: {empty[0]} is empty")
    return selectors


def _require_own_upload(request: AwsRequest, bucket: str, key: str, state: S3State) -> None:
    """moto takes the key of a multipart upload from its id, whatever key the request names."""
    upload_id = request.query.get("uploadId", [""])[0]
    known = state.key_of_upload(bucket, upload_id) if upload_id else None
    if known is not None and known != key:
        raise UnmappedError(f"s3: upload {upload_id} is not one of {key}")


def _deletions(request: AwsRequest, bucket: str, context: Mapping[str, Any]) -> list[Check]:
    """One right for each object of a multi-object delete; UnmappedError where the list is not one plain XML."""
    checks = []
    try:
        plain = _XML_DECLARATION.sub("", request.body.decode(), count=1)
        if "<!" in plain or "<?" in plain:  # entities, comments, other encodings: parsers differ in them
            raise ValueError("it is more than elements and texts")
        root = ElementTree.fromstring(plain)
    except (ElementTree.ParseError, ValueError) as error:
        raise UnmappedError(f"s3: the list of objects to delete can't be read: {error}") from None
    for item in root:
        name = item.tag.rpartition("}")[2]
        if name == "Quiet":
            continue
        fields = {child.tag.rpartition("}")[2]: child for child in item}
        odd = len(fields) != len(item) or any(len(child) or child.attrib for child in item)
        if name != "Object" or odd or "Key" not in fields:
            raise UnmappedError("s3: the list of objects to delete is not one of Objects with one Key each")
        version = fields.get("VersionId")
        action = "s3:DeleteObject" if version is None or not version.text else "s3:DeleteObjectVersion"
        checks.append(Check(action, _arn(bucket, fields["Key"].text or ""), context))
    if not checks or root.tag.rpartition("}")[2] != "Delete":
        raise UnmappedError("s3: the list of objects to delete names none")
    if "x-amz-bypass-governance-retention" in request.headers:
        checks += [Check("s3:BypassGovernanceRetention", check.resource, context) for check in checks]
    return checks


def _arn(bucket: str, key: str) -> str:
    return f"arn:aws:s3:::{bucket}/{key}"


def _action(request: AwsRequest, key: str, selectors: list[str]) -> str:
    table = _OBJECT if key else _BUCKET
    known = [table[(request.method, name)] for name in selectors if (request.method, name) in table]
    if selectors and len(known) != len(selectors):
        raise UnmappedError(
            f"s3: {request.method} ?{'&'.join(selectors)}: the emulator's authorizer doesn't know this operation"
        )
    action = known[0] if known else table.get((request.method, ""))
    if action is None:
        raise UnmappedError(
            f"s3: {request.method} {request.path}: the emulator's authorizer doesn't know this operation"
        )
    if not key or not request.query.get("versionId", [""])[0] or action in _SAME_FOR_A_VERSION:
        return action
    if action not in _VERSIONED:
        raise UnmappedError(f"s3: {action} has no versions")
    return _VERSIONED[action]


def _context(request: AwsRequest, bucket: str) -> dict[str, Any]:
    context: dict[str, Any] = {"s3:signatureversion": "AWS4-HMAC-SHA256", "s3:resourceaccount": None}
    context["s3:authtype"] = "REST-QUERY-STRING" if "X-Amz-Signature" in request.query else "REST-HEADER"
    for parameter, name in (
        ("prefix", "s3:prefix"),
        ("delimiter", "s3:delimiter"),
        ("max-keys", "s3:max-keys"),
        ("versionId", "s3:versionid"),
    ):
        if parameter in request.query:
            context[name] = request.query[parameter][0]
    for header in (
        "x-amz-server-side-encryption",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-acl",
        "x-amz-storage-class",
    ):
        if header in request.headers:
            context[f"s3:{header}"] = request.headers[header]
    for pair in request.headers.get("x-amz-tagging", "").split("&"):
        name, separator, value = pair.partition("=")
        if separator:
            context[f"s3:requestobjecttag/{decode_plus(name)}".lower()] = decode_plus(value)
    return {key: value for key, value in context.items() if value is not None}


def _object_extras(
    request: AwsRequest,
    bucket: str,
    key: str,
    action: str,
    selectors: list[str],
    context: Mapping[str, Any],
    state: S3State,
    key_arn: KeyLookup,
) -> list[Check]:
    rights = {right for name, right in _RIGHTS_OF_HEADERS.items() if name in request.headers}
    if any(name.startswith("x-amz-grant-") for name in request.headers):
        rights.add("s3:PutObjectAcl")
    checks = [Check(right, _arn(bucket, key), context) for right in sorted(rights)]
    if action in ("GetObject", "GetObjectVersion"):
        encryption = state.encryption_of(bucket, key, request.query.get("versionId", [""])[0] or None)
        if encryption:
            checks.append(_kms("kms:Decrypt", encryption, bucket, key, request, key_arn))
        return checks + (_absence(bucket, key, context, state) if action == "GetObject" else [])
    if action != "PutObject":
        return checks
    encryption = _encryption_asked(request) or state.default_encryption(bucket)
    multipart = "uploads" in selectors or "uploadId" in selectors
    if encryption and "uploadId" not in selectors:
        checks.append(_kms("kms:GenerateDataKey", encryption, bucket, key, request, key_arn))
    if (
        encryption and multipart
    ):  # S3 reads the encrypted parts back to join them (S3 user guide, "Uploading ... with SSE-KMS")
        checks.append(_kms("kms:Decrypt", encryption, bucket, key, request, key_arn))
    return checks + _copy_source(request, context, state, key_arn)


def _absence(bucket: str, key: str, context: Mapping[str, Any], state: S3State) -> list[Check]:
    """S3 tells that a key is missing (404) to who may list the bucket; others get 403. No prefix is asked for, so a
    right to list that a condition binds to one doesn't count (S3 API reference, GetObject, "Permissions")."""
    is_missing = state.bucket(bucket) is not None and not state.holds(bucket, key)
    return [Check("s3:ListBucket", f"arn:aws:s3:::{bucket}", context)] if is_missing else []


def _copy_source(request: AwsRequest, context: Mapping[str, Any], state: S3State, key_arn: KeyLookup) -> list[Check]:
    """What reading the source of a copy needs. The header is cut at `?` before it is decoded: `a%3Fb` is one key."""
    given = request.headers.get("x-amz-copy-source")
    if given is None:
        return []
    match = _COPY_SOURCE.fullmatch(given)
    if match is None:
        raise UnmappedError(f"s3: x-amz-copy-source {given!r} is not BUCKET/KEY[?versionId=ID], percent-encoded")
    bucket, key, version = match[1], unquote(match[2]), match[3]
    action = "s3:GetObjectVersion" if version else "s3:GetObject"
    checks = [Check(action, _arn(bucket, key), context)]
    stored = state.encryption_of(bucket, key, version)
    if stored:
        checks.append(_kms("kms:Decrypt", stored, bucket, key, request, key_arn))
    return checks


def _encryption_asked(request: AwsRequest) -> Encryption | None:
    if not request.headers.get("x-amz-server-side-encryption", "").startswith("aws:kms"):
        return None
    key = request.headers.get("x-amz-server-side-encryption-aws-kms-key-id", "alias/aws/s3")
    return Encryption(key, _true(request.headers.get("x-amz-server-side-encryption-bucket-key-enabled", "")))


def _kms(action: str, encryption: Encryption, bucket: str, key: str, request: AwsRequest, key_arn: KeyLookup) -> Check:
    # With a bucket key the encryption context is the bucket's ARN, else the object's.
    context_arn = f"arn:aws:s3:::{bucket}" if encryption.bucket_key else _arn(bucket, key)
    context = {
        "kms:viaservice": f"s3.{request.region}.amazonaws.com",
        "kms:encryptioncontext:aws:s3:arn": context_arn,
        "kms:encryptioncontextkeys": ["aws:s3:arn"],
    }
    return Check(action, key_arn(encryption.key), context)
