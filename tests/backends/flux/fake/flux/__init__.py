"""Stands in for byte-flux 1.1.1 where there is no GPU."""

from flux.cpp_mod import AGKernel, AGRingMode, AllGatherOption, GemmRS, NotCompiled, init_flux_shm

__version__ = "1.1.1"
__all__ = ["AGKernel", "AGRingMode", "AllGatherOption", "GemmRS", "NotCompiled", "init_flux_shm"]
