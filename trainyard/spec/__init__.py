"""Typed, validated models. A wrong value is refused here, in one line, before anything costs money.

- `job`: what to train, shared with the trainer: `JobSpec`, `ResolvedJob`, `load_job`.
- `platform`: what is deployed: `EnvironmentSpec`, `TenantSpec`, `TenantContract`, `load_environment`.
- `base`: YAML, overrides and error messages.
"""
