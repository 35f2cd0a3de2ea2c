"""Find how a tensor-parallel model should overlap its communication with its GEMMs on this machine."""
