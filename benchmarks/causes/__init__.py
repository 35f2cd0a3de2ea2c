"""Small training programs with one planted cause of slow communication each, for `record_causes.py`.

They import nothing of overlap_sweep: what diagnoses their traces must not have seen them.
"""
