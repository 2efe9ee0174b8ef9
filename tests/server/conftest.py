"""The fixtures of several files of tests of the server."""

from tests.server.page_api import api, browser, chromium, served

__all__ = ["api", "browser", "chromium", "served"]
