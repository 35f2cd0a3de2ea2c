"""From a sweep's points to measured run directories.

The launcher (Hydra's process, no torch) asks for the `group` that a point needs (`group_config`). A group is an agent
process that hosts torch's elastic launch, and its `worker` processes, which connect back and run one point after
another. What a worker measured lies in the run directory; over the connection only go the request and whether it was
done.
"""
