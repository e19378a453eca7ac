"""torchrun as a host of a job starts it: `python -m trainer.torchrun` takes torchrun's own options.

It spends most of a short start's time on importing torch and on taking it to pieces again at the end; see `importing`.
"""

import sys
from collections.abc import Sequence

from trainer.leaving import leave
from trainyard.importing import importing


def main(arguments: Sequence[str]) -> None:
    """Returns when all ranks have ended well; a rank's failure is torchrun's exception, which it has told about."""
    with importing():
        from torch.distributed import run
    run.main(list(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave(0)
