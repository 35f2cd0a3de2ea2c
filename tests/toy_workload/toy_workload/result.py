from overlap_sweep.results.measured import Measured, Timing


class ToyTimes(Measured, kw_only=True, tag="toy"):
    time: Timing


MEASURED = ToyTimes
