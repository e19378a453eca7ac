"""CloudFormation for the emulator: a type it doesn't know fails the deploy; it is never skipped in silence.

- `model`: what a resource type is: create, update, delete and a probe, all through AWS's own API.
- `network`, `identity`, `storage`, `operations`, `queues`: the types our stacks use, API-backed.
- `recorded`: types that moto has no API for: kept with an id and ARN of the right shape, and said to be so.
- `catalogue`: all of them by name; free of moto, so that a client can probe what a deployment made.
- `registry`, `engine`: how moto is made to use them; only the daemon imports these.
"""
