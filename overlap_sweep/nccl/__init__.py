"""Settings of NCCL by process group, and the forms in which frameworks read them."""
