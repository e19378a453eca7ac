"""A campaign that holds the planner's closed form of a step's time against dry runs, of jobs drawn at random.

The jobs are the memory campaign's (`memory_agreement.draws`); `campaign` compares and tells (`scripts/time_campaign`).
"""
