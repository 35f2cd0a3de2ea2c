"""ByteDance's Flux (github.com/bytedance/flux): GEMMs that communicate tile by tile, from inside the GEMM's kernel.

Written for byte-flux 1.1.1, the latest release on PyPI, whose `import flux` this is. It has ag_gemm (`AGKernel`) and
gemm_rs (`GemmRS`), and no GEMM with an all-reduce. It runs on GPUs of compute capability 8.0, 8.9 and 9.0, in float16
and bfloat16, and in FP8 on 8.9 alone. There are wheels for Python 3.10 and 3.11, torch 2.4 to 2.6 and CUDA 12.4; for
others it is built from source.
"""
