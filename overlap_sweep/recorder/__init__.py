"""What runs inside of the processes of a training run: it finds, times and profiles their steps."""
