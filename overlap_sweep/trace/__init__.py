"""Reading profiler traces: what ran, in which pass, and how much of the communication was hidden."""

from overlap_sweep.trace.overlap import PhaseSummary, TraceRow, analyse_trace, summarise

__all__ = ["PhaseSummary", "TraceRow", "analyse_trace", "summarise"]
