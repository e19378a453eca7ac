"""What adding or removing a tenant would change: two environment files synthesized and compared, nothing deployed."""

import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.hardware import BaseCost, base_cost
from trainyard.isolation.templates import synthesize
from trainyard.operate.stateful import Loss, Template, losses
from trainyard.spec.base import parse, read_yaml
from trainyard.spec.platform import EnvironmentSpec


@dataclass(frozen=True)
class Preview:
    """The difference between two environment files, as templates."""

    added: Mapping[str, int]
    """New stacks, with their numbers of resources."""
    removed: tuple[str, ...]
    """Stacks that would no longer be there."""
    changed: Mapping[str, tuple[str, ...]]
    """Stacks of both whose templates differ, with the logical ids that do."""
    lost: tuple[Loss, ...]
    """Stateful resources that the change would replace or drop."""
    kinds: Mapping[str, int]
    """What the new stacks are made of: CloudFormation type to number."""
    cost: BaseCost
    """What the new stacks cost a month while nothing runs."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "added": dict(self.added),
            "removed": list(self.removed),
            "changed": {stack: list(ids) for stack, ids in self.changed.items()},
            "lost": [str(loss) for loss in self.lost],
            "resources": dict(self.kinds),
            "base_cost": self.cost.document(),
        }


def preview(before: Path, after_text: str, checkout: Path) -> tuple[EnvironmentSpec, Preview]:
    """The environment that `after_text` describes, and how its stacks differ from those of the file `before`.

    InputError, naming the field, where the text is no valid environment. The two syntheses run at the same time.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-preview-") as folder:
        after = Path(folder) / before.name
        after.write_text(after_text, encoding="utf-8", newline="")
        environment = parse(EnvironmentSpec, read_yaml(after), str(before))
        with ThreadPoolExecutor(2) as pool:
            old, new = pool.map(lambda path: synthesize(path, checkout), (before, after))
    return environment, compare(old, new, environment.region)


def compare(old: Mapping[str, Template], new: Mapping[str, Template], region: str) -> Preview:
    """How the templates differ; both by stack name."""
    added, both = sorted(set(new) - set(old)), sorted(set(new) & set(old))
    kinds = Counter(item["Type"] for name in added for item in new[name].get("Resources", {}).values())
    return Preview(
        added={name: len(new[name].get("Resources", {})) for name in added},
        removed=tuple(sorted(set(old) - set(new))),
        changed={name: _changed(old[name], new[name]) for name in both if old[name] != new[name]},
        lost=tuple(losses(old, new)),
        kinds=dict(sorted(kinds.items())),
        cost=base_cost((new[name] for name in added), region),
    )


def _changed(old: Template, new: Template) -> tuple[str, ...]:
    before, after = old.get("Resources", {}), new.get("Resources", {})
    ids = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return tuple(ids) or ("outputs",)
