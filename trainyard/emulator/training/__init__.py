"""SageMaker training jobs that really run: one process per host, with the container's contract as a tree on disk.

- `validation`: what CreateTrainingJob refuses.
- `tree`: /opt/ml of one host: configuration, channels in, artifacts out.
- `attempt`: the processes of one try, from start to exit, reclaim or stop.
- `logs`: lines to CloudWatch Logs, with the job role's rights.
- `job`: a job from Starting to its end, through spot reclaims.
- `jobs`: all jobs, quotas and reclaim plans; `api`: SageMaker's API over them.
"""
