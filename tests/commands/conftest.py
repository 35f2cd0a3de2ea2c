"""The made-up sweeps of the reports' tests."""

from tests.report.conftest import images, made, no_images, no_page

__all__ = ["images", "made", "no_images", "no_page"]
