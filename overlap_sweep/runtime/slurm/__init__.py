"""`hydra/launcher=slurm` and `submitit_slurm`: points in Slurm jobs, submitted through submitit.

`launcher` waits for results, `submission` decides which points share a job and hands jobs to Slurm, `batch` is what
runs in one, and `queue` asks Slurm how they are and keeps what a later launch has to know of them.
"""
