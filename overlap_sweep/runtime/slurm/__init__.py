"""`hydra/launcher=slurm` and `submitit_slurm`: points in Slurm jobs, submitted through submitit.

`launcher` waits for results, `submission` packs points into jobs and submits them, `batch` runs inside a job, and
`queue` asks Slurm for the states of jobs and keeps their records for later launches.
"""
