"""How long an environment of many tenants takes to synthesize, and how large its largest stack is.

.venv/bin/python benchmarks/synthesis.py --tenants 100

A process for each core makes a part of the tenants (stacks/parts.py); `--processes 1` has one make all. On a busy
machine the CPU seconds divided by the processes say what the wall clock can't.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainyard.isolation.templates import synthesize_into  # after the path is set

ROOT = Path(__file__).resolve().parents[1]
MAX_RESOURCES = 450
"""CloudFormation takes 500 a stack; 50 are left for what comes."""


def environment(num_tenants: int) -> str:
    """The production example's first tenant, as many times as asked for."""
    content = yaml.safe_load((ROOT / "environments" / "production.yaml").read_text())
    tenant = next(iter(content["tenants"].values()))
    content["tenants"] = {f"team{number:03d}": {**tenant, "network_index": number} for number in range(num_tenants)}
    # What they are all guaranteed must be there.
    content["max_instances"] = {kind: count * num_tenants for kind, count in content["max_instances"].items()}
    return yaml.safe_dump(content)


def main() -> int:
    """Synthesizes once as `trainyard deploy` does, with every check, and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--processes", type=int, help="default: one for each core")
    parser.add_argument("--without-checks", action="store_true", help="as the proof of isolation synthesizes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.yaml"
        path.write_text(environment(arguments.tenants))
        assembly = Path(folder) / "cdk.out"
        assembly.mkdir()
        context = {"checks": "off"} if arguments.without_checks else {}
        context |= {"processes": str(arguments.processes)} if arguments.processes else {}
        start = time.perf_counter()
        templates = synthesize_into(assembly, path, ROOT, context)
        seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sizes = Counter({name: len(template["Resources"]) for name, template in templates.items()})
    largest, size = sizes.most_common(1)[0]
    checks = "without" if arguments.without_checks else "with"
    cpu_seconds = used.ru_utime + used.ru_stime
    print(f"{arguments.tenants} tenants, {len(templates)} stacks, {sum(sizes.values())} resources")
    print(f"synthesis {checks} the checks: {seconds:.1f} s on {os.cpu_count()} cores ({cpu_seconds:.1f} s of CPU)")
    print(f"largest stack: {largest}, {size} resources (limit here {MAX_RESOURCES})")
    return 0 if size <= MAX_RESOURCES else 1


if __name__ == "__main__":
    sys.exit(main())
