"""The rights of one job's own role: what the tenant's job role may do, narrowed to that job's prefixes and streams.

SageMaker takes a job's role with no session tags but those of whoever creates the job (`SessionChainingConfig`), and a
function's session has none, so one role for all jobs can't tell them apart: a role for each can. The broker makes it
(`broker_roles`) in a path of its own below the tenant's `jobs/`, where the boundary lets roles be passed from, under
the tenant's boundary. Pure functions of the contract and the record, in plain dictionaries: Lambda code that imports
nothing from other rooms.

Not narrowed: the keys, where a tenant has bucket keys (a request then says the bucket, not the object; objects are held
by the S3 statements); and because nothing in AWS can, the metric namespace and the listing of unfinished uploads, which
shows names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.functions.broker_queue import training_job_prefix

JOB_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
MAX_POLICY_CHARACTERS = 10_240
"""IAM: all inline policies of a role together, white space aside."""

_READ_OBJECTS = ["s3:GetObject", "s3:GetObjectVersion"]
_WRITE_OBJECTS = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:ListMultipartUploadParts", "s3:PutObject"]
_READ_KEY = ["kms:Decrypt", "kms:DescribeKey"]
_WRITE_KEY = ["kms:Encrypt", "kms:GenerateDataKey", "kms:GenerateDataKeyWithoutPlaintext"]


def job_role_path(contract: Mapping[str, Any]) -> str:
    """IAM path of the roles of single jobs: the broker may make, change and remove roles of no other path."""
    return f"/trainyard/{contract['environment']}/{contract['tenant']}/jobs/each/"


def job_role_arn(contract: Mapping[str, Any], job_id: str) -> str:
    """The job's own role, which is called as the job is (63 characters at most; IAM takes 64)."""
    return f"arn:aws:iam::{contract['account']}:role{job_role_path(contract)}{job_id}"


def job_role_trust(contract: Mapping[str, Any]) -> dict[str, Any]:
    """The trust policy: SageMaker, at work for this account."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
        "Condition": {"StringEquals": {"aws:SourceAccount": contract["account"]}},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def job_role_policies(
    contract: Mapping[str, Any], job_id: str, inputs: Iterable[str], *, attempt: str = ""
) -> dict[str, Any]:
    """The role's one inline policy, for PutRolePolicy.

    `inputs`: s3:// locations that the job reads beside its own (its channels, and what it streams), each a file or a
    prefix. `attempt`: the newest; the training jobs of a queue are called after it. ValueError for an input that is in
    none of the tenant's buckets, is a whole bucket, or holds a wildcard.
    """
    if not job_id.startswith(f"{contract['tenant']}-") or set("*?$") & set(job_id):
        raise ValueError(f"job {job_id}: is none of tenant {contract['tenant']}")
    read = _inputs(contract, [*inputs, f"s3://{contract['buckets']['data']}/jobs/{job_id}/"])
    statements = [*_objects(contract, job_id, read), *_keys(contract, job_id, read)]
    statements += _telling(contract, _streams(contract, job_id, attempt or job_id))
    statements += [*_image_and_files(contract), *_network(contract)]
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(sid: str, actions: list[str], resources: list[str], **conditions: Mapping[str, Any]) -> dict[str, Any]:
    statement: dict[str, Any] = {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources}
    return {**statement, "Condition": conditions} if conditions else statement


def _inputs(contract: Mapping[str, Any], locations: Iterable[str]) -> dict[str, list[str]]:
    """Bucket to the prefixes in it."""
    own = {name for name in contract["buckets"].values() if name}
    found: dict[str, list[str]] = {}
    for location in locations:
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        if not location.startswith("s3://") or bucket not in own:
            raise ValueError(f"{location}: is in none of the tenant's buckets")
        if not prefix.strip("/") or set("*?$") & set(prefix):
            raise ValueError(f"{location}: is no file or folder that a policy can name")
        if prefix not in found.setdefault(bucket, []):
            found[bucket].append(prefix)
    return found


def _below(prefix: str) -> list[str]:
    """A folder's objects; of a file also the file itself. Without the slash, `a/b` would open `a/bc` too."""
    return [f"{prefix}*"] if prefix.endswith("/") else [prefix, f"{prefix}/*"]


def _objects(contract: Mapping[str, Any], job_id: str, read: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    checkpoints = contract["buckets"]["checkpoints"]
    own = f"jobs/{job_id}/"
    listed = {bucket: list(prefixes) for bucket, prefixes in read.items()}
    listed.setdefault(checkpoints, []).append(own)
    statements = [
        _allow(
            f"List{number}",
            ["s3:ListBucket"],
            [f"arn:aws:s3:::{bucket}"],
            StringLike={"s3:prefix": [item for prefix in prefixes for item in _listings(prefix)]},
        )
        for number, (bucket, prefixes) in enumerate(sorted(listed.items()), 1)
    ]
    buckets = [f"arn:aws:s3:::{bucket}" for bucket in sorted(listed)]
    objects = [
        f"arn:aws:s3:::{bucket}/{item}"
        for bucket, prefixes in read.items()
        for prefix in prefixes
        for item in _below(prefix)
    ]
    return [
        *statements,
        _allow("FindBuckets", ["s3:GetBucketLocation"], buckets),
        _allow("FindTornUploads", ["s3:ListBucketMultipartUploads"], [f"arn:aws:s3:::{checkpoints}"]),
        _allow("ReadInputs", _READ_OBJECTS, objects),
        _allow("ReadWriteOwn", _READ_OBJECTS + _WRITE_OBJECTS, [f"arn:aws:s3:::{checkpoints}/{own}*"]),
    ]


def _listings(prefix: str) -> list[str]:
    """What a reader of the prefix may ask a listing for: the prefix with and without its slash, and all below."""
    plain = prefix.rstrip("/")
    return [plain, f"{plain}/*"]


def _keys(contract: Mapping[str, Any], job_id: str, read: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """To decrypt inputs, and to encrypt and decrypt what the job writes: with `job_keys` for its own objects alone. S3
    then tells KMS their names (the encryption context), which are sealed into each object's own key."""
    keys, buckets = contract["keys"], contract["buckets"]
    readable = [keys[name] for name in ("data", "artifacts") if buckets.get(name) in read]
    own = {"kms:EncryptionContext:aws:s3:arn": f"arn:aws:s3:::{buckets['checkpoints']}/jobs/{job_id}/*"}
    bound = {"StringLike": own} if contract.get("job_keys") else {}
    others = [
        f"arn:aws:s3:::{buckets['checkpoints']}/{item}"
        for one in read.get(buckets["checkpoints"], ())
        for item in _below(one)
    ]
    named: dict[str, Any] = {"StringLike": {"kms:EncryptionContext:aws:s3:arn": others}}
    return [
        _allow("Decrypt", list(_READ_KEY), readable),
        # Another job's checkpoints, where they are an input: its objects are under the same key, by their own names.
        *([_allow("DecryptInputs", ["kms:Decrypt"], [keys["checkpoints"]], **named)] if bound and others else []),
        _allow("SeeKey", ["kms:DescribeKey"], [keys["checkpoints"]]),
        _allow("Encrypt", ["kms:Decrypt", *_WRITE_KEY], [keys["checkpoints"]], **bound),
        _allow(
            "EncryptVolumes", ["kms:CreateGrant"], [keys["checkpoints"]], Bool={"kms:GrantIsForAWSResource": "true"}
        ),
    ]


def _streams(contract: Mapping[str, Any], job_id: str, attempt: str) -> list[str]:
    """Patterns of the names of the job's log streams, which begin with the training job's. A resume's is called
    `<job id>-r2`; no other job's id can begin so, as an id ends with its time and a random part. In the name of what a
    queue starts, the hash of the attempt's name is the job's own."""
    names = [f"{job_id}{end}" for end in ("", "/*", "-r*")]
    if contract.get("shares"):
        names.append(f"{training_job_prefix(contract['tenant'], attempt)}*")
    return names


def _telling(contract: Mapping[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """Logs, into streams of these names, and metrics."""
    place = f"{contract['region']}:{contract['account']}"
    shared, own = (f"arn:aws:logs:{place}:log-group:{name}" for name in (JOB_LOG_GROUP, contract["log_group"]))
    groups = [f"{group}{end}" for group in (shared, own) for end in ("", ":*")]
    streams = [f"{group}:log-stream:{name}" for group in (shared, own) for name in names]
    return [
        _allow("OpenLogStreams", ["logs:CreateLogStream", "logs:DescribeLogStreams"], groups),
        _allow("WriteLogs", ["logs:PutLogEvents"], streams),
        _allow("CreateTrainingLogGroup", ["logs:CreateLogGroup"], [shared, f"{shared}:*"]),
        _allow(
            "WriteMetrics",
            ["cloudwatch:PutMetricData"],
            ["*"],
            StringLike={"cloudwatch:namespace": [f"trainyard/{contract['tenant']}", "/aws/sagemaker/*"]},
        ),
    ]


def _image_and_files(contract: Mapping[str, Any]) -> list[dict[str, Any]]:
    place = f"{contract['region']}:{contract['account']}"
    pull = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    repository = f"arn:aws:ecr:{place}:repository/trainyard-{contract['environment']}"
    return [
        _allow("LogInToRegistry", ["ecr:GetAuthorizationToken"], ["*"]),
        _allow("PullImage", pull, [repository]),
        _allow("FindFileSystem", ["fsx:DescribeFileSystems"], ["*"]),
    ]


def _network(contract: Mapping[str, Any]) -> list[dict[str, Any]]:
    """SageMaker makes the job's network interfaces as the job's role."""
    ec2 = f"arn:aws:ec2:{contract['region']}:{contract['account']}"
    interfaces = f"{ec2}:network-interface/*"
    joined = [
        *(f"{ec2}:subnet/{name}" for name in contract["subnet_ids"]),
        *(f"{ec2}:security-group/{name}" for name in contract["security_group_ids"]),
        interfaces,
    ]
    leave = ["CreateNetworkInterfacePermission", "DeleteNetworkInterface", "DeleteNetworkInterfacePermission"]
    see = ["DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs"]
    return [
        _allow("JoinNetwork", ["ec2:CreateNetworkInterface"], joined),
        _allow(
            "LeaveNetwork",
            [f"ec2:{name}" for name in leave],
            [interfaces],
            ArnEquals={"ec2:Vpc": f"{ec2}:vpc/{contract['vpc_id']}"},
        ),
        _allow("SeeNetwork", [f"ec2:Describe{name}" for name in see], ["*"]),
    ]
