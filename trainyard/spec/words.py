"""How a number of things is told to people: in the plural, but for one."""


def counted(number: float, thing: str) -> str:
    """1 process, 1,024 processes; 1 day, 2.5 days; 1 copy, 0 copies. `thing`: one of them."""
    told = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{told} {thing if number == 1 else plural(thing)}"


def plural(thing: str) -> str:
    """ranks, processes, batches, copies, days."""
    if thing.endswith("y") and thing[-2:-1] not in "aeiou":
        return f"{thing[:-1]}ies"
    return f"{thing}es" if thing.endswith(("s", "x", "ch", "sh")) else f"{thing}s"


def either(number: float, one: str, many: str) -> str:
    """The verb that goes with so many: is, are."""
    return one if number == 1 else many
