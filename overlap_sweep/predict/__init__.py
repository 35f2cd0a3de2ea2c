"""Predicts what a change of a training would gain, from one recording: a graph of its steps, replayed with something
changed."""
