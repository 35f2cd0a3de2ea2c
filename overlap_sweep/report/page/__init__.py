"""report.html, one file that needs no network, and the plots beside it as PNGs."""
