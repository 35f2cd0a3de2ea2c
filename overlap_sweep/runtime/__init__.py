"""Runs a sweep's points and writes their run directories.

The launcher (Hydra's process, no torch) starts the `group` that a point needs (`group_config`). A group is an agent
process that hosts torch's elastic launch, and its `worker` processes, which connect back and run one point after
another. Workers write results to the run directory; only requests and statuses go over the connection.
"""
