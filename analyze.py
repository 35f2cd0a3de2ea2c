"""Analyse what launch.py measured, or any profiler trace. See `python analyze.py --help`."""

from overlap_sweep.commands.command_line import main

if __name__ == "__main__":
    main()
