"""From run directories to answers: metrics, choice, switches, scaling. Needs neither torch nor a GPU."""
