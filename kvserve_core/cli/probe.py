"""``kvserve probe``: how fast a link is, measured with the transport that will use it."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvserve_core.cli.doctor import ConfigFile
from kvserve_core.cli.output import AsJson, print_json
from kvserve_core.errors import ConfigError
from kvserve_core.probing import KEY, LEASE_S, MAX_BYTES, ProbeSource, measure
from kvserve_core.registry import default_registry
from kvserve_core.settings import load_settings
from kvserve_core.transport import Transport
from kvserve_core.units import format_bandwidth, format_bytes, parse_bytes, parse_duration

WAKE_S = 0.2


def probe(
    address: Annotated[str | None, typer.Argument(help="What the other side printed; leave it out to be that.")] = None,
    nbytes: Annotated[str, typer.Option("--bytes", help="What is offered, up to 1 GiB.")] = "64MiB",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Fetches, of which the estimate is made.")] = 5,
    deadline: Annotated[str, typer.Option(help="The longest that a fetch may take.")] = "30s",
    for_: Annotated[str, typer.Option("--for", help="How long to offer it; Ctrl-C ends it sooner.")] = "1h",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the link to another machine with the configured transport, for the settings 'bandwidth' and 'priors'."""
    settings = load_settings(file=config).settings
    name = address.partition("://")[0] if address and "://" in address else settings.transport.name
    transport: Transport = default_registry().create("transport", settings.transport.spec(name), f"transport.{name}")
    try:
        if address is None:
            _offer(transport, _size(nbytes), parse_duration(for_), as_json)
        else:
            _print(address, *measure(transport, address, rounds, parse_duration(deadline)), as_json)
    finally:
        transport.close()


def _size(text: str) -> int:
    size = parse_bytes(text)
    if not 0 < size <= MAX_BYTES:
        raise ConfigError(
            f"{format_bytes(size)} cannot be offered; give from 1 byte to {format_bytes(MAX_BYTES)}", "bytes"
        )
    return size


def _offer(transport: Transport, nbytes: int, seconds: float, as_json: bool) -> None:
    address = transport.publish(KEY, ProbeSource(nbytes), LEASE_S)
    try:
        if as_json:
            print_json({"address": address, "nbytes": nbytes})
        else:
            typer.echo(f"on the other machine run: kvserve probe '{address}'")
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            transport.poll()
            time.sleep(WAKE_S)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    finally:
        transport.withdraw(KEY, "the probe ended")


def _print(address: str, bytes_per_s: float, each: list[float], as_json: bool) -> None:
    found: dict[str, Any] = {"address": address, "bytes_per_s": bytes_per_s, "each": each}
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{format_bandwidth(bytes_per_s)} (fetches from {format_bandwidth(min(each))} to {format_bandwidth(max(each))})"
    )
