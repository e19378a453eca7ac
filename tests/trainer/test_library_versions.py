"""The trainer runs with transformers 5.17 and torch 2.11 as well as with the pinned versions.

Verified with torch 2.11.0 and transformers 5.17.0 (which takes huggingface-hub below 2) together in front of the pinned
ones on PYTHONPATH: Qwen3 with a tied head and Mixtral under DDP, FSDP2, ZeRO-1 and 3, tensor, pipeline, context and
expert, and Llama under each schedule, at two ranks against one process, four steps, within 1e-7; and with transformers
5.17.0 alone tests/trainer/test_communication_volume.py and the GPU benchmark's --tiny. What stood in the way were parts
that differ between versions of transformers, which this holds out, and three places that say so where they are met
(`strategies/mesh.py`, `pipeline.py`, `tensor_parallel.py`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[2] / "training_container" / "trainer"
UNSTABLE = ("transformers.distributed", "transformers.integrations", "transformers.generation")
"""5.17's transformers.distributed has no EmbeddingParallel, 5.23's no MoEParamShard."""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_is_imported_that_differs_between_versions_of_transformers() -> None:
    found = {
        f"{path.relative_to(TRAINER)}: {module}"
        for path in TRAINER.rglob("*.py")
        for module in imported_modules(path)
        if module.startswith(UNSTABLE)
    }
    assert not found
