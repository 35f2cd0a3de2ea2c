"""Two or more sweeps, runs or traces against each other."""
