"""Lambda: re-checks a job that has started, and stops one that breaks its tenant's rules."""

from collections.abc import Iterable
from typing import Any


def violations(job: dict[str, Any], rules: dict[str, Any]) -> list[str]:
    """What is wrong with `job`, as it is described."""
    resources, network = job.get("ResourceConfig") or {}, job.get("VpcConfig") or {}
    groups = [resources, *(resources.get("InstanceGroups") or [])]
    kinds = [group["InstanceType"] for group in groups if group.get("InstanceType")]
    output, files = job.get("OutputDataConfig") or {}, []
    places = [output.get("S3OutputPath"), (job.get("CheckpointConfig") or {}).get("S3Uri")]
    for extra in ("DebugHookConfig", "ProfilerConfig", "TensorBoardOutputConfig"):
        places.append((job.get(extra) or {}).get("S3OutputPath"))
    for channel in job.get("InputDataConfig") or []:
        source = channel.get("DataSource") or {}
        places.append((source.get("S3DataSource") or {}).get("S3Uri"))
        files.append((source.get("FileSystemDataSource") or {}).get("FileSystemId"))

    most, many = rules["types"], []
    for part in ([resources], groups[1:]):
        counts: dict[Any, int] = {}
        for group in part:
            kind = group.get("InstanceType")
            counts[kind] = counts.get(kind, 0) + (group.get("InstanceCount") or 0)
        many += [f"{count} {kind}" for kind, count in counts.items() if count > most.get(kind, 0)]

    def foreign(values: Iterable[Any], allowed: Iterable[str]) -> list[str]:
        return sorted({str(value) for value in values if value and value not in allowed})

    outside = [place for place in places if place and not (place + "/").startswith(tuple(rules["places"]))]
    image = (job.get("AlgorithmSpecification") or {}).get("TrainingImage") or ""
    own_role = rules["own_roles"] + str((job.get("Environment") or {}).get("TRAINYARD_JOB_ID"))
    seconds = (job.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds") or 0
    wrong = {
        "name": [] if job["TrainingJobName"].startswith(tuple(rules["prefixes"])) else [job["TrainingJobName"]],
        "role": foreign([job.get("RoleArn")], [rules["role"], own_role]),
        "subnets": foreign(network.get("Subnets") or ["none"], rules["subnets"]),
        "security groups": foreign(network.get("SecurityGroupIds") or ["none"], rules["groups"]),
        "instance types": foreign(kinds or ["none"], most),
        "instances": many,
        "output key": foreign([output.get("KmsKeyId") or "none"], [rules["key"]]),
        "volume key": foreign([resources.get("VolumeKmsKeyId")], [rules["key"]]),
        "training plan": foreign([resources.get("TrainingPlanArn")], rules["plans"]),
        "file system": foreign(files, [rules["files"]]),
        "buckets": outside,
        "image": [] if image.startswith(rules["images"]) else [image or "none"],
        "running time": [f"{seconds} s"] if seconds > rules["seconds"] else [],
        "remote debug": ["on"] if (job.get("RemoteDebugConfig") or {}).get("EnableRemoteDebug") else [],
        "serverless": ["on"] if job.get("ServerlessJobConfig") else [],
    }
    return [f"{what}: {', '.join(values)}" for what, values in wrong.items() if values]


def handler(event: dict[str, Any], context: object) -> list[str]:
    """`event`: the job's name and its tenant's rules."""
    import boto3

    sagemaker, name, rules = boto3.client("sagemaker"), event["job"], event["rules"]
    print(f"job {name}")
    found = violations(sagemaker.describe_training_job(TrainingJobName=name), rules)
    if found:
        print(f"stopping {name}: {'; '.join(found)}")
        try:
            sagemaker.stop_training_job(TrainingJobName=name)
        except sagemaker.exceptions.ClientError:  # it has ended, or is ending
            if sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "InProgress":
                raise
        data = [{"MetricName": rules["metric"], "Value": 1}]
        boto3.client("cloudwatch").put_metric_data(Namespace=rules["namespace"], MetricData=data)
    return found
