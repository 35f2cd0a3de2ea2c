"""Compares two or more sweeps, runs or traces, and shows the history of a store."""
