"""All ranks of a run on one timeline, as a trace that Perfetto and chrome://tracing load."""
