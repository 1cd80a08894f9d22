"""A profile library as a page that people can read: figures, table, how it was found."""

from kvserve_core.report.data import Report, read
from kvserve_core.report.page import page, write_html, write_png

__all__ = ["Report", "page", "read", "write_html", "write_png"]
