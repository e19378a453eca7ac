"""The image's stack: an asset for the repository that jobs pull from, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from stacks.naming import TenantScope
from trainyard.errors import InputError
from trainyard.isolation.templates import synthesize_into

ROOT = Path(__file__).parents[2]
DIGEST = f"sha256:{'ab' * 32}"


@pytest.mark.parametrize("name", ["local", "production"])
def test_an_image_goes_to_the_repository_that_jobs_pull_from(
    name: str, environments: dict[str, Any], tmp_path: Path
) -> None:
    path, environment = ROOT / "environments" / f"{name}.yaml", environments[name]
    templates = synthesize_into(tmp_path, path, ROOT, {"image": DIGEST, "checks": "off"})
    stack = f"trainyard-{name}-image"
    assert templates.keys() == {stack} and "Resources" not in templates[stack]
    (image,) = json.loads((tmp_path / f"{stack}.assets.json").read_text())["dockerImages"].values()
    program, *arguments = image["source"]["executable"]
    assert Path(program).is_file() and arguments == ["load", DIGEST]
    (destination,) = image["destinations"].values()
    scope = TenantScope(environment, next(iter(environment.tenants)))
    assert scope.image_repository.endswith(f".amazonaws.com/{destination['repositoryName']}")
    assert destination["region"] == environment.region and destination["imageTag"] == f"sha256-{'ab' * 16}"
    assert "assumeRoleArn" not in destination, "no role of the bootstrap may push there"


def test_what_is_no_digest_is_refused_in_one_line(tmp_path: Path) -> None:
    for wrong in ("latest", ".trainyard/image/layout", "sha256:ab"):
        with pytest.raises(InputError, match=r"must be sha256:<64 hex digits>; scripts/publish_image says which"):
            synthesize_into(tmp_path, ROOT / "environments/local.yaml", ROOT, {"image": wrong, "checks": "off"})
