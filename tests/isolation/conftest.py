"""One synthesis of the local environment for all tests, and ways to alter its templates."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.isolation import Site, resolve_templates
from trainyard.isolation.templates import Deployment, synthesize
from trainyard.spec.platform import EnvironmentSpec, load_environment

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "environments" / "local.yaml"
CLUSTER = {
    "slurm_version": "25.05",
    "ami": "ami-0123456789abcdef0",
    "root_device": "/dev/xvda",
    "node_groups": {"train": {"instance_type": "p5.48xlarge", "max_instances": 2}},
    "login": {"instance_type": "m6i.xlarge"},
}

Templates = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def environment_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The local environment the other way round: acme, whose policies are the ones that are broken, has a broker, which
    makes a role for each job. Both have a cluster."""
    content = yaml.safe_load(LOCAL.read_text())
    content["tenants"]["acme"]["submission"] = "broker"
    content["tenants"]["acme"]["job_isolation"] = "key"
    for tenant in content["tenants"].values():
        tenant["cluster"] = CLUSTER
    content["tenants"]["globex"]["submission"] = "direct"
    path = tmp_path_factory.mktemp("environment") / "local.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture(scope="session")
def environment(environment_path: Path) -> EnvironmentSpec:
    """Two tenants, acme and globex."""
    return load_environment(environment_path)


@pytest.fixture(scope="session")
def templates(environment_path: Path) -> Templates:
    """What app.py makes of it, in a process of its own."""
    return synthesize(environment_path, ROOT)


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


@pytest.fixture
def names(templates: Templates, environment: EnvironmentSpec) -> Deployment:
    """What the resources are called once deployed."""
    return Deployment.of(templates, environment)
