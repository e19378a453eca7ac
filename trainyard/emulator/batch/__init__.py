"""AWS Batch's queues for SageMaker training jobs: quota shares, jobs that wait in them, and whose turn it is.

`scheduler` decides, and is pure; `service_jobs` keeps the jobs and starts and stops their training jobs; `api` answers.
What AWS leaves open (its choice of whom to stop is "a custom heuristic") is decided in the simplest way that keeps its
promises: what is guaranteed is given back, and the youngest borrower goes first.
"""
