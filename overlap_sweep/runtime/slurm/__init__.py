"""`hydra/launcher=slurm` and `submitit_slurm`: points in Slurm jobs, submitted through submitit.

`packing` decides which points share a job, `submission` hands jobs to Slurm, `batch` is what runs in one, `queue` asks
Slurm how they are, `watch` waits for results, and `records` is what a later launch knows of them.
"""
