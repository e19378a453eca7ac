"""What the runbooks do, as functions: checks, deployment, the quickstart."""
