"""Tables beside the configuration files of the KVServe reference implementation: head scores and component speeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from kvserve_core.errors import ConfigError
from kvserve_core.json_text import parsed

Scores = Sequence[Sequence[float]]
"""``[L][H]``."""
GIB = 2**30
ON_CODES = ("ans", "bitcomp")
"""Components whose GB/s count bytes of u8 codes, half of the original bf16 bytes."""


def read_scores(text: str, path: str = "scores") -> list[list[float]]:
    """Head scores ``[L][H]`` from KVServe's CSV, DuoAttention's ``full_attention_heads.tsv``, or our JSON.

    Raises:
        ConfigError: not a table of finite numbers with rows of equal length.
    """
    try:
        if text.lstrip().startswith(("[", "{")):
            found = parsed(text)
            rows = [_numbers(row) for row in (found["scores"] if isinstance(found, dict) else found)]
        else:
            lines = [line for line in text.splitlines() if line.strip()]
            tabs = any("\t" in line for line in lines)
            rows = [[float(cell) for cell in row] for row in csv.reader(lines, delimiter="\t" if tabs else ",")]
    except (ValueError, TypeError, KeyError, OverflowError) as error:  # OverflowError: an integer of 400 digits
        raise ConfigError(f"not a table of scores: {error}", path) from None
    if not rows or len({len(row) for row in rows}) > 1 or not rows[0]:
        raise ConfigError(f"needs one row a layer, all of equal length; got {[len(r) for r in rows][:8]}", path)
    if not all(abs(x) < float("inf") for row in rows for x in row):
        raise ConfigError("a score is not finite", path)
    return rows


def _numbers(row: object) -> list[float]:
    """A row of a JSON table; text is refused, though each digit of ``"12"`` is a number."""
    if not isinstance(row, list) or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in row):
        raise ValueError(f"a row is {row!r:.60}, expected a list of numbers")
    return [float(x) for x in row]


SpeedTable = Mapping[str, Mapping[int, tuple[float, float]]]
"""Component -> input length -> seconds to (encode, decode) one original byte."""


def read_speeds(text: str, path: str = "speeds") -> dict[str, dict[int, tuple[float, float]]]:
    """A speed CSV (``type,input_length,...,prefill_throughput(GB/s),decode_throughput(GB/s)``), on original bytes.

    Its GB are 2^30 bytes; those of a codec are bytes of u8 codes, half of the original.

    Raises:
        ConfigError: a column is missing, or a speed is not a number above 0.
    """
    table: dict[str, dict[int, tuple[float, float]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        try:
            name, length = row["type"].strip().lower(), int(row["input_length"])
            rates = (float(row["prefill_throughput(GB/s)"]), float(row["decode_throughput(GB/s)"]))
            if not all(0 < rate < float("inf") for rate in rates):
                raise ValueError(f"speeds are {rates}, expected numbers above 0")
            factor = GIB * (2 if name in ON_CODES else 1)
            encode, decode = (1 / (rate * factor) for rate in rates)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"row {len(table) + 1}: {type(error).__name__} {error}", path) from None
        table.setdefault(name, {})[length] = (encode, decode)
    if not table:
        raise ConfigError("no rows", path)
    return table


def nearest_row(rows: Mapping[int, tuple[float, float]], length: int) -> tuple[float, float]:
    """The row of the input length that is closest, of two the shorter."""
    return rows[min(rows, key=lambda n: (abs(n - length), n))]
