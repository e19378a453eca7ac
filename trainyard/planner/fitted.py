"""Tables in a terminal that is too narrow for them: rich would cut numbers short, and break words after each letter."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

LEAST_OF_WORDS = 30
"""Columns that the last column's words need, to be read from left to right."""

GAP = "  "
"""Between columns, as rich's tables without a box have it."""

INDENT = 6


class Fitted:
    """A table where there is room for it; else a line for each row, with the last column's words beneath it, or with
    each cell behind its heading. Nothing is cut. Of tables without a box or padded edges."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.table.columns
        widths = [max(map(cell_len, [_heading(column), *_cells(column)])) for column in columns]
        gaps, all_but_last = cell_len(GAP) * (len(columns) - 1), sum(widths[:-1])
        of_words = widths[-1] if columns[-1].no_wrap else min(widths[-1], LEAST_OF_WORDS)
        if all_but_last + of_words + gaps <= options.max_width:
            yield self.table
        elif all_but_last + gaps <= options.max_width and not columns[-1].no_wrap:
            yield from self._with_words_beneath(widths[:-1])
        else:
            yield from self._named()

    def _with_words_beneath(self, widths: list[int]) -> Iterator[RenderableType]:
        columns = self.table.columns[:-1]
        yield Text(_line(columns, [_heading(column) for column in columns], widths), style=self.table.header_style)
        for style, cells in self._rows():
            yield Text(_line(columns, cells[:-1], widths), style=style)
            if cells[-1]:
                yield Padding(Text(cells[-1], style=style), (0, 0, 0, INDENT))

    def _named(self) -> Iterator[RenderableType]:
        headings = [_heading(column) for column in self.table.columns]
        words = not self.table.columns[-1].no_wrap
        for style, cells in self._rows():
            # What has no heading is a mark at the row's beginning; "-" stands for what isn't known.
            marks = [cell for heading, cell in zip(headings, cells, strict=True) if not heading and cell]
            first, *named = [
                f"{heading} {cell}" if index < len(cells) - words else cell
                for index, (heading, cell) in enumerate(zip(headings, cells, strict=True))
                if heading and cell not in ("", "-")
            ]
            last = [named.pop()] if words and named and cells[-1] else []
            yield Text(" ".join([*marks, first]), style=style)
            for line in (", ".join(named), *last):
                if line:
                    yield Padding(Text(line, style=style), (0, 0, 0, INDENT))

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        """(style, cells) of each row."""
        by_column = [list(_cells(column)) for column in self.table.columns]
        for row, cells in zip(self.table.rows, zip(*by_column, strict=True), strict=True):
            yield str(row.style or ""), list(cells)


def _heading(column: Column) -> str:
    return _plain(column.header)


def _cells(column: Column) -> Iterator[str]:
    return map(_plain, column.cells)


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _line(columns: list[Column], cells: list[str], widths: list[int]) -> str:
    padded = (
        " " * (width - cell_len(cell)) + cell if column.justify == "right" else cell + " " * (width - cell_len(cell))
        for column, cell, width in zip(columns, cells, widths, strict=True)
    )
    return GAP.join(padded).rstrip()


class Command:
    """A line for a shell. Where it is longer than the terminal is wide it goes on behind backslashes: rich would break
    it, and who pastes it would run its beginning."""

    def __init__(self, *words: str) -> None:
        """`words`: what belongs together, an option and its value say."""
        self.words = words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = " ".join(self.words)
        yield Text(line if cell_len(line) <= options.max_width else " \\\n  ".join(self.words))
