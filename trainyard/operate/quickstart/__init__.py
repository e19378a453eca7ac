"""`scripts/quickstart`: the main job, end to end, on AWS on this machine.

`flow.run` is read top to bottom: emulator, deploy, data, plan, train (with a spot reclaim), the uninterrupted run to
compare with, isolation, report. Every claim it prints is checked on what the job left behind.
"""
