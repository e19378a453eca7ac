"""Many trials of one job with other settings: grid or search, under one budget, losers stopped, one table.

Flow: `space` (what `--over` says) -> `search` (which settings are tried next) -> `runner` (launches trials as ordinary
jobs, looks after them) -> `stopping` (who is stopped early; pure) -> `standings` (one table). `record` keeps it all:
a trial is written down before its job is launched, and its job is found again by its name, so that whoever goes on
with a sweep launches no trial twice.
"""
