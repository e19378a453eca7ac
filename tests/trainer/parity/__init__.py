"""The proof that every layout trains as one process does.

`table` names the configurations, `test_parity` runs each against the single-process run of the same job, `golden`
holds what one process gave when it was last looked at. The short part is in scripts/test, all of it in
scripts/test --full.
"""
