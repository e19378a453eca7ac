"""A campaign that holds the planner's closed forms of memory against dry runs, of jobs and ranks drawn at random.

`draws` makes a seed's job; `campaign` compares and tells (`scripts/memory_campaign`); the tests are of both.
"""
