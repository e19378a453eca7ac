"""Every request to the emulator is judged here, by the policies that are deployed at that moment.

- `requests`: an HTTP request becomes a service, an operation and its parameters.
- `actions`: these become checks: an IAM action, a resource ARN, condition keys. What isn't mapped is denied.
- `s3`: the same for S3, with the KMS use that an encrypted object implies.
- `principals`: who calls, by access key; role sessions, and roles assumed by services under their trust policy.
- `policies`: the policies that moto holds: identity, boundary, session, resource.
- `decide`: the decision and its reason. The evaluation itself is ministack's (MIT, pinned).
- `middleware`: the WSGI wrapper, and denials in each protocol's own form.
"""
