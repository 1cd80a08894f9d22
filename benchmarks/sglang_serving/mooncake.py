"""SGLang's own backend ``mooncake`` on a CPU over TCP: where it is installed, and the patch that it needs there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

INSTALLED = Path(sys.prefix) / "mooncake"
"""Where ``make venv-mooncake`` puts it, with the system libraries that it links to under ``system``."""
HELP = (
    "run 'make venv-mooncake'; without apt-get, install 'mooncake-transfer-engine-non-cuda' with pip, and libibverbs,"
    " libnl-3 and libnl-route-3 where LD_LIBRARY_PATH says; or leave it out: --ways kvserve exact raw"
)
PATCH = '''
import importlib.abc, importlib.util, sys


class HostIndices(importlib.abc.MetaPathFinder):
    """SGLang's mooncake sender uses pinned memory and CUDA events; on a CPU it must not."""

    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.disaggregation.mooncake.conn":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            module.MooncakeKVSender.supports_host_tensor_indices = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, HostIndices())
'''


class MooncakeMissing(RuntimeError):
    """It cannot be loaded; the message says why and what to do."""


def environ(folder: Path, stubs: Path) -> dict[str, str]:
    """Variables of a server that uses it. folder: where the patch is written; stubs: of the tests, with their own.

    Raises:
        MooncakeMissing: this environment has no mooncake that loads.
    """
    (folder / "cpu_mooncake.py").write_text(PATCH, encoding="utf-8")
    theirs = (stubs / "sitecustomize.py").read_text(encoding="utf-8")
    (folder / "sitecustomize.py").write_text(f"{theirs}\nimport cpu_mooncake\n", encoding="utf-8")
    found = {
        "PYTHONPATH": _joined("PYTHONPATH", folder, stubs, INSTALLED),
        "LD_LIBRARY_PATH": _joined("LD_LIBRARY_PATH", *_system()),
        "MC_FORCE_TCP": "1",
        "MOONCAKE_PROTOCOL": "tcp",
    }
    _check(found)
    return found


def _joined(variable: str, *folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(variable)])])


def _system() -> list[Path]:
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    return [INSTALLED / "system" / "usr" / "lib" / triplet, INSTALLED / "system" / "lib" / triplet]


def _check(variables: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import mooncake.engine"]
    tried = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if tried.returncode:
        raise MooncakeMissing(f"mooncake cannot be loaded ({tried.stderr.strip().splitlines()[-1]}); {HELP}")
