"""A tenant's life: its entry in the environment file, what adding it changes and costs, what it has, how it leaves.

- `entry`: the environment file edited as text, comments kept.
- `preview`: two environment files synthesized and compared, with the base cost of the difference.
- `survey`: what a tenant has, from the file and from the account.
- `logs`: what its functions wrote, and what its network refused.
- `removal`: stacks, data and keys taken away by the tenant's own policy, and the report of what is left.
"""
