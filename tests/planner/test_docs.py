"""docs/planner.md's figures are the code's: whoever changes one is told of the other."""

import re
from pathlib import Path

import pytest

from trainyard.hardware.prices import MAX_AGE_DAYS
from trainyard.planner import constants, convolutions, goodput, host_memory, loading
from trainyard.planner.communication import EFA, INFINIBAND

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEMORY = constants.DEFAULT_MEMORY


@pytest.fixture(scope="module")
def page() -> str:
    """Its words and those of the page of its errors, each line's end a space."""
    texts = [
        (DOCS / name).read_text(encoding="utf-8") for name in ("planner.md", "planner_accuracy.md", "planner_unseen.md")
    ]
    return re.sub(r"\s+", " ", " ".join(texts))


@pytest.mark.parametrize(
    "said",
    [
        f"{loading.IMAGES_PER_CORE_SECOND:.0f} a second each",
        f"above {loading.INTERPRETER_IMAGES_PER_SECOND:,.0f} images/s",
        f"({goodput.CHECKPOINT_BYTES_PER_PARAM} bytes a trained parameter)",
        f"held against {goodput.RECOVERY_OBJECTIVE_SECONDS:.0f} s",
        f"reclaimed once in {goodput.SPOT_HOURS_BETWEEN_RECLAIMS:g} h",
        f"rates differ by {goodput.FAILURE_RATE_SPREAD:g} between clusters",
        f"{goodput.NVME_WRITE_BYTES_PER_SECOND_PER_DISK / 1e9:g} GB/s written",
        f"{goodput.NVME_READ_BYTES_PER_SECOND_PER_DISK / 1e9:g} GB/s read",
        f"{goodput.FSX_BYTES_PER_SECOND / 1e9:g} GB/s in all",
        f"{host_memory.PROCESS_GIB:g} GiB a process and {host_memory.SYSTEM_GIB:g} for the system",
        f"{host_memory.OFFLOADED_BYTES:g} bytes a trained parameter",
        f"{host_memory.NVME_BUFFER_GIB:g} GiB of buffers a process",
        f"times {host_memory.OFFLOAD_BUFFER_FACTOR:g} for buffers",
        f"on demand {MAX_AGE_DAYS['on_demand']} days",
        f"capacity blocks and training plans {MAX_AGE_DAYS['capacity_block']}, spot {MAX_AGE_DAYS['spot']}",
        f"{convolutions.SPREAD:g}, assumed, for images",
        f"EFA gives {EFA.efficiency:.0%} of its rate",
        f"give {INFINIBAND.efficiency:.0%} (24 A100",
        f"its fragmentation ({MEMORY.fragmentation:.0%})",
        f"the CUDA context and NCCL ({MEMORY.context_gib:g} GiB)",
        f"({MEMORY.state_error:.0%} of the state; {MEMORY.moving_error:.0%} of what comes and goes in a step",
        f"{MEMORY.plain_moving_error:.0%} in plain loops",
    ],
)
def test_the_page_says_what_the_code_has(page: str, said: str) -> None:
    assert said in page


def test_every_command_that_the_page_names_for_its_figures_is_there(page: str) -> None:
    root = DOCS.parent
    named = set(re.findall(r"(?:benchmarks|tests)/[\w/]+\.py", page))
    assert {"benchmarks/planner_accuracy.py", "benchmarks/planner_decoding.py"} <= named
    assert [name for name in sorted(named) if not (root / name).is_file()] == []
