"""What a client may ask for in headers: workload, latency budget and quality floor; and the cache salt that follows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.requests import RequestOptions

PREFIX = "x-kvserve-"
HEADERS = {f"{PREFIX}workload": "workload", f"{PREFIX}slo": "slo", f"{PREFIX}min-quality": "min_quality"}


@dataclass(frozen=True)
class Service:
    """A request's demands. None: the engines' settings apply. min_quality is always set, for it decides the salt."""

    min_quality: float
    workload: str | None = None
    slo_s: float | None = None

    @classmethod
    def from_headers(cls, headers: Mapping[str, str], min_quality: float) -> Service:
        """``min_quality``: for requests that name none.

        Raises:
            ConfigError: a header that begins with ``x-kvserve-`` is unknown, or its value is wrong.
        """
        for name in headers:
            if name.startswith(PREFIX) and name not in HEADERS:
                raise ConfigError(did_you_mean(name, HEADERS, "header"))
        given = {HEADERS[name]: headers[name] for name in HEADERS if name in headers}
        try:
            options = RequestOptions.parse(given)
        except ConfigError as error:
            header = next((h for h, key in HEADERS.items() if key == error.path), "")
            raise ConfigError(error.reason, header or error.path) from None
        floor = min_quality if options.min_quality is None else options.min_quality
        return cls(floor, options.workload, options.slo_s)

    def params(self) -> dict[str, Any]:
        """As both servers read it, in ``kv_transfer_params["kvserve"]``."""
        chosen = {"workload": self.workload, "slo": self.slo_s, "min_quality": self.min_quality}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def quality_class(self) -> str:
        """Requests of one class may share KV that lost something: their floors are the same."""
        return repr(float(self.min_quality)).removesuffix(".0")

    def salt(self, given: str | None) -> str:
        """A ``cache_salt`` that keeps quality classes apart, and clients that salt themselves.

        vLLM takes 128 characters without slash, at or NUL, so the client's own salt goes in as a digest.
        """
        own = f".{hashlib.sha256(given.encode()).hexdigest()[:32]}" if given else ""
        return f"kvserve-q{self.quality_class}{own}"
