"""What makes the numbers worth anything: GPU-bound timing, profiler capture, the environment's record."""
