import msgspec

from overlap_sweep.results.measured import Count, Measured, ResolvedConfig, Timing


class _Toy(msgspec.Struct):
    chunks: Count


class ToyConfig(ResolvedConfig, kw_only=True):
    toy: _Toy


class ToyTimes(Measured, kw_only=True, tag="toy"):
    resolved = ToyConfig

    time: Timing


MEASURED = ToyTimes
