"""Building blocks: one file per thing a tenant has. Each takes objects and a `TenantScope`, and exposes what it made.

Dependencies run one way, because a key policy names roles and a role names its boundary:
network -> guard rails (boundary) -> identity (roles) -> keys -> storage, file system, logs -> permissions (what the
roles may do). So the boundary can name subnets and security groups but neither keys nor buckets: what must name a
key (the output key of a job) is denied in `permissions`, in a policy of its own.
"""
