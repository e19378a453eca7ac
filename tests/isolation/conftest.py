"""One synthesis of the local environment for all tests, and ways to alter its templates."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.isolation import Site, resolve_templates
from trainyard.isolation.templates import synthesize
from trainyard.spec.platform import EnvironmentSpec, load_environment

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "environments" / "local.yaml"

Templates = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def environment() -> EnvironmentSpec:
    """Two tenants, acme and globex."""
    return load_environment(LOCAL)


@pytest.fixture(scope="session")
def templates() -> Templates:
    """What app.py makes of it, in a process of its own."""
    return synthesize(LOCAL, ROOT)


@pytest.fixture(scope="session")
def site(templates: Templates, environment: EnvironmentSpec) -> Site:
    """Resolved."""
    return resolve_templates(templates, environment)


@pytest.fixture
def altered(templates: Templates, environment: EnvironmentSpec) -> Callable[[Callable[[Templates], None]], Site]:
    """The site after somebody has edited the templates."""

    def run(edit: Callable[[Templates], None]) -> Site:
        changed = copy.deepcopy(templates)
        edit(changed)
        assert json.dumps(changed) != json.dumps(templates), "the edit changed nothing: the test would prove nothing"
        return resolve_templates(changed, environment)

    return run
