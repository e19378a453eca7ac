"""What a job will need, before it costs anything: memory, time, money. Closed formulas, no torch.

- `resolve(job, world_size=None)`: every `auto` decided -> `ResolvedJob`.
- `plan(job)`: ranked configurations with memory, step time, dollars, goodput -> `Plan`; `planner.render` prints it.
- `search(job)`: the same over machines, counts and layouts -> `Search`; `planner.render_search` prints it,
  `planner.page` draws both.
- `predict(dict)`, `predict_jsonl(lines, errors)`: one configuration in, one prediction out.
"""

from trainyard.planner.plan import Plan, plan
from trainyard.planner.predict import Errors, predict, predict_jsonl
from trainyard.planner.resolve import resolve
from trainyard.planner.results import Search
from trainyard.planner.search import search

__all__ = ["Errors", "Plan", "Search", "plan", "predict", "predict_jsonl", "resolve", "search"]
