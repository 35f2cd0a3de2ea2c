"""`python -m overlap_sweep` is `overlap-sweep`."""

from overlap_sweep.commands.installed import main

if __name__ == "__main__":
    main()
