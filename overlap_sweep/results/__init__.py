"""Run directories, the contract between launching and analysing; and the statistics of what was measured."""
