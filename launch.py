"""Measure one point, or with -m a sweep of points. See `python launch.py --help`."""

from overlap_sweep.commands.launch import main

if __name__ == "__main__":
    main()
