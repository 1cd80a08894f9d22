"""``kvserve vllm-proxy``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import httpx
import typer
import uvicorn

from kvserve_core.errors import ConfigError
from kvserve_core.registry import default_registry
from kvserve_core.settings import load_settings
from kvserve_core.units import parse_bytes, parse_duration
from kvserve_vllm.proxy.app import Options, application

N = TypeVar("N", int, float)
Floor = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Quality floor of requests that name none; default: that of the settings."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the servers' --api-key, for what the proxy itself asks of them."),
]


def vllm_proxy(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill server; may be repeated.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode server; may be repeated.")],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen.")] = 8000,
    min_quality: Floor = None,
    prefill_timeout: Annotated[str, typer.Option(help="After it the decode server computes alone.")] = "120s",
    health_interval: Annotated[str, typer.Option(help="Between two checks of a server.")] = "2s",
    max_body: Annotated[str, typer.Option(help="Larger requests are refused; each is held whole.")] = "16MiB",
    api_key_file: KeyFile = None,
    config: Annotated[Path | None, typer.Option(help="A settings file, instead of KVSERVE_CONFIG.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Route requests to prefill and decode servers that run the KVServe connector of vLLM."""
    settings = load_settings(file=config).settings
    floor = settings.min_quality if min_quality is None else min_quality
    chosen = settings.classifier
    options = Options(
        tuple(_url(u, "prefill") for u in prefill),
        tuple(_url(u, "decode") for u in decode),
        floor,
        _above_zero(parse_duration, prefill_timeout, "prefill-timeout", "5s"),
        _above_zero(parse_duration, health_interval, "health-interval", "5s"),
        max_body_bytes=_above_zero(parse_bytes, max_body, "max-body", "16MiB"),
        classifier=None if chosen is None else default_registry().create("workload", chosen, "classifier"),
        api_key="" if api_key_file is None else _key(api_key_file),
    )
    logging.basicConfig(level=_level(log_level), format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request, health checks too
    uvicorn.run(application(options), host=host, port=port, log_level=log_level, access_log=False, ws="none")


def _url(text: str, option: str) -> str:
    wrong = ConfigError(f"{text!r} is not the URL of a server; write for example http://10.0.0.5:8000", option)
    try:
        parts = urlsplit(text)
        _ = httpx.URL(text), parts.port  # each finds what the other does not
    except (ValueError, httpx.InvalidURL):
        raise wrong from None
    spaced = any(char.isspace() for char in text)
    if spaced or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise wrong
    if parts.username is not None:  # it would be shown on /health and /metrics
        raise ConfigError("a URL with a user name or password is not taken; let clients send their own", option)
    return text.rstrip("/")


def _above_zero(parse: Callable[[str], N], text: str, option: str, example: str) -> N:
    try:
        value = parse(text)
    except ConfigError as error:
        raise error.under(option) from None
    if not value:
        raise ConfigError(f"{text!r} must be above 0; write for example {example!r}", option)
    return value


def _key(file: Path) -> str:
    try:
        key = file.read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}; name a text file", "api-key-file") from None
    if not key.isprintable() or not key or " " in key:
        raise ConfigError(f"{str(file)!r} holds no key; expected one word in one line", "api-key-file")
    return key


def _level(text: str) -> int:
    levels = logging.getLevelNamesMapping()
    if text.upper() not in levels:
        raise ConfigError(f"{text!r} is no log level; one of debug, info, warning, error", "log-level")
    return levels[text.upper()]
