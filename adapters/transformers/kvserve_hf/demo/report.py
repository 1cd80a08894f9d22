"""One table per link, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvserve_core.units import format_bandwidth, format_bytes, format_duration
from kvserve_hf.demo.run import Run

COLUMNS = (
    *("prompt", "profile", "why", "ratio", "wire", "encode", "transfer", "decode", "TTFT", "raw TTFT"),
    *("KL", "top-1", "same text"),
)


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """The runs of one link."""
    link = runs[0].link_bps
    limit = "unlimited" if link is None else format_bandwidth(link / 8)
    table = Table(*COLUMNS, title=f"link: {limit}", title_justify="left", box=None, pad_edge=False)
    for run in runs:
        faster = "green" if run.ttft_s < run.raw_ttft_s else None
        table.add_row(*_cells(run), style=faster if run.profile != "raw" else None)
    console.print(table)
    console.print()


def _cells(run: Run) -> list[str]:
    return [
        run.prompt,
        run.profile,
        run.reason,
        f"{run.cr:.2f}",
        format_bytes(run.wire_bytes),
        *(format_duration(s) for s in (run.encode_s, run.transfer_s, run.decode_s, run.ttft_s, run.raw_ttft_s)),
        f"{run.kl:.4f}",
        f"{run.top1:.3f}",
        "yes" if run.same_text else "no",
    ]
