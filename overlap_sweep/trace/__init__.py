"""Reading profiler traces: what ran, in which pass, and how much of the communication was hidden."""
