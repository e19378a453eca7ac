"""How often to save: what saving and redoing cost together is least."""

import math


def best_interval_seconds(*, save_seconds: float, stall_seconds: float, seconds_between_failures: float) -> float:
    """Seconds from one save to the next.

    `stall_seconds`: training stands still for so long per save. Daly (2006, "A higher order estimate of the optimum
    checkpoint interval", eq. 37): with d the stall and M the mean time between failures,
    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d while d < 2M, else M. Its first term is Young's (1974).
    A save must end before the next begins, so never less than `save_seconds`.
    """
    stall, between = stall_seconds, seconds_between_failures
    if stall >= 2 * between:
        return max(between, save_seconds)
    ratio = stall / (2 * between)
    best = math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall
    return max(best, save_seconds)
