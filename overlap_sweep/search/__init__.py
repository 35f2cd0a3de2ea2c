"""Find the fastest setting of every pass without measuring all of them.

A `cell` is one pass of one operator and what its slots may be given; its trail is what was measured of it so far.
`bisect` searches one cell, as a generator that says what to measure next, and `sweeper` feeds the cells of a sweep to a
Hydra launcher, round by round. `knob_sweeper` does the same for the knobs of any workload, which `knobs` searches.
"""
