"""Find the fastest setting of every pass without measuring all of them.

A `cell` is one pass of one operator and what its slots may be given. `bisect` searches one cell, as a generator that
says what to measure next; `trail` is what it knows so far. `sweeper` feeds the cells of a sweep to a Hydra launcher,
round by round. `knob_sweeper` does the same for knobs of any workload, with the search in `knobs`.
"""
