"""What the page needs of others, to be embedded: Vega for its charts, DataTables for its table."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from overlap_sweep.cache import cached_bytes


def vega_script() -> str:
    """Defines `window.vegaEmbed`."""

    def make() -> bytes:
        import vl_convert

        # Without an argument it makes the bundle of vegaEmbed; its stub requires one.
        return vl_convert.javascript_bundle().encode()  # type: ignore[call-arg]

    return _in_script(cached_bytes("scripts", f"vega {version('vl-convert-python')}", make).decode())


def tables_script() -> str:
    """A module whose default export is DataTables."""
    return _in_script((_itables() / "dt_bundle.js").read_text(encoding="utf-8"))


def tables_style() -> str:
    return (_itables() / "dt_bundle.css").read_text(encoding="utf-8")


def _itables() -> Path:
    # Importing the package would import pandas.
    spec = find_spec("itables")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "html"


def _in_script(code: str) -> str:
    """In strings and comments of JavaScript, which is where it may stand, `<\\/` is `</`."""
    return code.replace("</script", r"<\/script").replace("<!--", r"<\!--")
