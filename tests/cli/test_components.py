from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from plugin_folders import FOLDER

Run = Callable[..., Any]
Install = Callable[..., None]
FIELDS = {"kind", "name", "status", "reason", "provider", "version", "source", "summary"}
BROKEN = ("import_error", "raising", "misspelt", "old_api", "duplicate", "not_a_component", "exits", "no_hook")


def test_json_is_a_list_of_rows(kvserve: Run, install: Install) -> None:
    install("good")
    done = kvserve("list-components", "--json")
    assert done.code == 0
    assert all(row.keys() == FIELDS for row in done.json)
    assert {"acme.rle", "acme.fpga", "static"} <= {row["name"] for row in done.json}


def test_broken_plugins_are_rows_and_no_failure(kvserve: Run, install: Install) -> None:
    install("good", *BROKEN)
    done = kvserve("list-components", "--json")
    assert done.code == 0
    broken = [row for row in done.json if row["status"] == "broken"]
    assert {"lost", "raising", "misspelt", "old.codec", "dup.twice", "odd.target"} <= {row["name"] for row in broken}
    assert all(row["reason"] for row in broken)
    assert next(row for row in done.json if row["name"] == "acme.rle")["status"] == "ok"


def test_strict_fails_on_a_broken_plugin(kvserve: Run, install: Install) -> None:
    install("import_error")
    assert kvserve("list-components", "--kind", "policy").code == 0
    done = kvserve("list-components", "--kind", "policy", "--strict", "--json")
    assert done.code == 1
    assert "acme_module_that_is_not_there" in done.out


def test_strict_imports_each_component(kvserve: Run, install: Install) -> None:
    install("unfit")
    assert kvserve("list-components").code == 0
    assert kvserve("list-components", "--strict").code == 1


def test_strict_passes_where_nothing_is_broken(kvserve: Run, install: Install) -> None:
    install("good")
    done = kvserve("list-components", "--kind", "policy", "--strict", "--json")
    assert done.code == 0
    assert [row["name"] for row in done.json] == ["analytic", "bandit", "static", "acme.first"]


def test_the_table_takes_brackets_literally_and_counts(kvserve: Run, install: Install) -> None:
    install("good", "import_error")
    done = kvserve("list-components", "--kind", "codec")
    assert "acme-good[fpga]" in done.out
    assert "Run-length codes." in done.out
    assert re.search(r"[1-9]\d* unavailable, 1 broken", done.out)  # built-ins that need a GPU are among them
    assert "\x1b" not in done.out


def test_an_unknown_kind_gives_the_nearest(kvserve: Run, install: Install) -> None:
    install()
    done = kvserve("list-components", "--kind", "codecs")
    assert done.code == 2
    assert done.err.startswith("error: unknown kind 'codecs'; did you mean 'codec'? allowed: ")


@pytest.mark.parametrize("disabled", ["", "acme"])
def test_plugins_on_the_path_are_found_by_their_metadata(disabled: str) -> None:
    folders = [str(FOLDER / name) for name in ("good", "import_error", "misspelt")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "KVSERVE_DISABLED_PLUGINS": disabled}
    done = subprocess.run(
        [sys.executable, "-m", "kvserve_core.cli", "list-components", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environ,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["lost"]["status"] == rows["misspelt"]["status"] == "broken"
    assert rows["misspelt.right"]["status"] == "ok"
    assert ("acme.rle" in rows) is not bool(disabled)
    assert rows.get("acme", {}).get("reason") == ("disabled by KVSERVE_DISABLED_PLUGINS" if disabled else None)
