"""The renderer of charts: Vega's JavaScript, which vl-convert brings for pages and runs for PNGs, if it can here."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from overlap_sweep import cache as kept

_LIMITED = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2); import vl_convert; "
_BUNDLE = "vl_convert.javascript_bundle()"


@cache
def why_it_cannot_run() -> str | None:
    """Returns why vl-convert cannot run in this process, and the fix; None if it can."""
    if not find_spec("vl_convert"):
        return "vl-convert is not installed; pip install vl-convert-python"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    # Its V8 ends a process in which it cannot reserve its address space, of some hundred GiB.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    command = [sys.executable, "-c", _LIMITED + _BUNDLE, str(max(0, limit - used))]
    failed = subprocess.run(command, capture_output=True, check=False).returncode
    return "ulimit -v leaves vl-convert too little address space; use ulimit -v unlimited" if failed else None


@cache
def page_script() -> str | None:
    """Returns the script that defines `window.vegaEmbed`; None if it was never made here and cannot be."""
    if not find_spec("vl_convert"):
        return None
    key = f"vega {version('vl-convert-python')}"
    found = kept.find("scripts", key)
    if found is None and not why_it_cannot_run():
        import vl_convert

        # Without an argument it returns the bundle of vegaEmbed; its stub requires one.
        found = vl_convert.javascript_bundle().encode()  # type: ignore[call-arg]
        kept.keep("scripts", key, found)
    return found.decode() if found is not None else None


def left_out(*, page: bool = True, images: bool = False) -> list[str]:
    """Returns a sentence if a page or images are written without charts here, else an empty list."""
    missing = (page and page_script() is None) or (images and why_it_cannot_run())
    return [f"Charts are left out: {why_it_cannot_run()}."] if missing else []
