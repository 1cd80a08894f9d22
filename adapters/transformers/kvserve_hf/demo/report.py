"""One table per link, for people, on a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvserve_core.units import format_bandwidth
from kvserve_hf.demo.run import Run

LINE = ("prompt", "profile", "ratio", "wire MB", "TTFT s", "raw TTFT s", "KL", "top-1", "text")
NOTE = (
    "TTFT counts the prompt's prefill, done once, and everything from the choice to the first token. KL (nats/token)"
    " and top-1 are against the answer from uncompressed KV; text says whether it is the same. The quality floor is on"
    " exp(-KL), the lower 95 % bound of its mean over the library's texts; one prompt may lie below it."
)


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """The runs of one link: a row each, and under it why and where the time went."""
    link = runs[0].link_bps
    limit = "unlimited" if link is None else format_bandwidth(link / 8)
    table = Table(title=f"link: {limit}", title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(LINE):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for run in runs:
        faster = run.profile != "raw" and run.ttft_s < run.raw_ttft_s
        table.add_row(*_cells(run), style="green" if faster else None)
    console.print(table)
    for run in runs:
        console.print(f"  {run.prompt}: {run.reason}; {_times(run)}", soft_wrap=True)
    console.print()


def _cells(run: Run) -> list[str]:
    return [
        run.prompt,
        run.profile,
        f"{run.cr:.2f}",
        f"{run.wire_bytes / 1e6:.2f}",
        f"{run.ttft_s:.3f}",
        f"{run.raw_ttft_s:.3f}",
        f"{run.kl:.4f}",
        f"{run.top1:.3f}",
        "same" if run.same_text else "differs",
    ]


def _times(run: Run) -> str:
    parts = {"encode": run.encode_s, "transfer": run.transfer_s, "decode": run.decode_s}
    return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())
