"""A tenant's entry put into an environment file, or taken out, with every other character of the file kept.

The text is edited, not dumped again: comments, order and spacing are the people's. What the edit made is parsed and
compared with what it should mean before anything is written; a file whose shape the edit can't follow is refused.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainyard.errors import InputError


def queue_of(text: str) -> tuple[str, dict[str, Any]]:
    """Name and entry of a queue as `--queue` has it; InputError where it doesn't look like one."""
    name, equals, rest = text.partition("=")
    types, colon, number = rest.rpartition(":")
    if not (name and equals and types and colon and number.isdecimal()):
        raise InputError(f"--queue {text}: must look like NAME=TYPE[,TYPE]:MAX, e.g. gpu=ml.p5.4xlarge:4")
    return name, {"instance_types": types.split(","), "max_instances": int(number)}


def with_tenant(text: str, name: str, entry: Mapping[str, Any], where: str) -> str:
    """`text` (an environment file) with one more tenant at the end of `tenants`."""
    tenants = _tenants(text, where)
    lines = text.splitlines(keepends=True)
    indent = tenants.value[0][0].start_mark.column
    end = _end_of(tenants.value[-1][1], lines, indent)
    dumped = yaml.safe_dump({name: _plain(entry)}, sort_keys=False, default_flow_style=None, width=110, indent=2)
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    block = [newline, *(" " * indent + line + newline for line in dumped.splitlines())]
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += newline
    changed = "".join([*lines[:end], *block, *lines[end:]])
    wanted = yaml.safe_load(text)
    wanted["tenants"][name] = _plain(entry)
    return _checked(changed, wanted, where, f"write the entry of {name} by hand")


def without_tenant(text: str, name: str, where: str) -> str:
    """`text` without that tenant's entry, and without the comment lines that stand directly above it; where there is no
    such entry, as it is."""
    tenants = _tenants(text, where)
    lines = text.splitlines(keepends=True)
    names = [key.value for key, _ in tenants.value]
    if name not in names:
        return text
    if len(names) == 1:
        raise InputError(
            f"{where}: {name} is the only tenant, and an environment has at least one; add another first, or destroy "
            f"the environment (cdk destroy --all -c environment={where}), which stops at protected stacks and at "
            "buckets that hold objects, and knows nothing of removal.data or export_to"
        )
    index = names.index(name)
    node, value = tenants.value[index]
    start = node.start_mark.line
    while start and lines[start - 1].lstrip().startswith("#") and _column(lines[start - 1]) == node.start_mark.column:
        start -= 1
    end = _end_of(value, lines, node.start_mark.column)
    # The blank line that set it apart goes too: the one before the last tenant, else one of two that would meet.
    last = index == len(names) - 1
    if start and not lines[start - 1].strip() and (last or not lines[end].strip()):
        start -= 1
    wanted = yaml.safe_load(text)
    del wanted["tenants"][name]
    return _checked("".join([*lines[:start], *lines[end:]]), wanted, where, f"take the entry of {name} out by hand")


def replace_file(path: Path, text: str) -> None:
    """Write the file whole or not at all, with its permissions; through a link, the file that it points to."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: can't be written ({error.strerror}); make it writable") from None


def read_text(path: Path) -> str:
    """The file as it is, line ends and all; it has been read as an environment before."""
    return path.read_bytes().decode("utf-8")


def _tenants(text: str, where: str) -> yaml.MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "load_environment has read it"
    node = next(value for key, value in root.value if key.value == "tenants")
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        raise InputError(f"{where}: tenants stands in braces; write one tenant per block to let it be edited")
    return node


def _end_of(node: yaml.Node, lines: list[str], indent: int) -> int:
    """The number of the first line after a tenant's value and the comments that are indented under it."""
    end = _last_line(node) + 1
    while end < len(lines) and lines[end].lstrip().startswith("#") and _column(lines[end]) > indent:
        end += 1
    return end


def _last_line(node: yaml.Node) -> int:
    """The line of the last character: a block's own end mark lies behind the blank lines and comments after it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    mark = node.end_mark
    return int(mark.line - 1 if mark.column == 0 and mark.line > node.start_mark.line else mark.line)


def _column(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(value: Any) -> Any:
    """As people write it: lists for tuples, 900 for 900.0."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _checked(changed: str, wanted: dict[str, Any], where: str, mend: str) -> str:
    try:
        means = yaml.safe_load(changed)
    except yaml.YAMLError:
        means = None
    if means != wanted or (means and list(means["tenants"]) != list(wanted["tenants"])):
        raise InputError(f"{where}: its layout can't be edited without changing something else; {mend}")
    return changed
