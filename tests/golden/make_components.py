"""Write a golden frame for each built-in stage that has none: ``python tests/golden/make_components.py [NAME...]``.

The files in ``components`` hold one frame for each component and format version. A file that is there is never
changed: when encoded bytes change, raise the component's ``format_version``, keep the old one in ``reads``, run this,
and commit the new files beside the old ones.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvserve_core.registry import default_registry, unavailable  # the path comes first
from kvserve_core.testing.checks_golden import write
from plugins.conformance_cases import GOLDEN, label_of, rows, subject


def main(names: list[str]) -> None:
    """Write the missing files of these components, or of all."""
    torch.set_num_threads(1)
    for row in rows():
        component = default_registry().manifest(row.kind, row.name).component
        wanted = row.name in names or not names
        if not wanted or unavailable(component):
            continue
        on = subject(row, Path("unused"))
        label = label_of(row)
        if (on.golden or label) and (path := write(replace(on, golden=GOLDEN), label)):
            sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
