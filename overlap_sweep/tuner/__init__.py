"""The whole workflow of `+experiment=tp_overlap_tuner`: search, try together, prove, report; and `tune` in Python."""
