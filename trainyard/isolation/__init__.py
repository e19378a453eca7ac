"""The proof of isolation: no principal of a tenant can do anything to another tenant, and each can do its own work.

`open_site` synthesizes an environment and resolves its templates to an account as it would be deployed (`templates`,
`account`); `prove` asks every request that would cross a tenant's border (`crossings`, from the actions in
`catalogue`) and every request that a tenant's own work needs (`needs`), and has each decided by an evaluator of IAM
policies of its own (`conditions`, `policy`, `evaluator`). `survey` shows that the proof sees: it breaks every statement
in turn (`mutants`). Nothing here calls AWS, imports the CDK or reads credentials.
"""

from trainyard.isolation.mutants import Survey, survey
from trainyard.isolation.proof import Finding, Proof, Site, open_site, prove, resolve_templates

__all__ = ["Finding", "Proof", "Site", "Survey", "open_site", "prove", "resolve_templates", "survey"]
