"""Per-collective configuration, read by a C compiler with the header of the NCCL that is installed."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from overlap_sweep.nccl.settings import GroupSetting
from tests.nccl.settings import one

CUDA = "#include <stddef.h>\ntypedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n"
"""All that nccl.h needs of CUDA."""


def header() -> Path | None:
    """nccl.h in NCCL_HOME or in NVIDIA's package."""
    package = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    homes = [os.environ.get("NCCL_HOME"), *(package.submodule_search_locations or [] if package else [])]
    return next((path for home in homes if home and (path := Path(home) / "include/nccl.h").exists()), None)


def version(path: Path) -> str:
    return ".".join(re.findall(r"^#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", path.read_text(), re.MULTILINE))


def test_a_compiler_reads_what_is_set(tmp_path: Path) -> None:
    path, compiler = header(), shutil.which("cc")
    if path is None or compiler is None:
        pytest.skip("needs a C compiler, and nccl.h in NCCL_HOME/include or of the package nvidia-nccl-cu13")
    setting = GroupSetting(
        description="dp",
        collective="all_reduce",
        max_ctas=8,
        min_ctas=2,
        cga_cluster_size=4,
        cta_policy=1,
        algorithm="ring",
    )
    found = one("per_collective", setting, nccl=version(path))
    if not found.text:
        pytest.skip(found.left_out[0])
    for name, text in {"cuda_runtime.h": CUDA, "cuda_fp16.h": "", found.file: found.text}.items():
        (tmp_path / name).write_text(text)
    values = ["maxCTAs", "minCTAs", "cgaClusterSize", "CTAPolicy", "nvlsCTAs == INT_MIN"]
    arguments = ", ".join(f"config.{value}" for value in [*values, "algSelection"])
    call = "ncclAllReduceConfig(0, 0, 0, ncclFloat, ncclSum, 0, 0, &config)"
    (tmp_path / "main.c").write_text(f"""#include "{found.file}"
#include <stdio.h>
ncclResult_t ncclAllReduceConfig(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config) {{
  return from || to || count || type != ncclFloat || op != ncclSum || comm || stream || config->maxCTAs != 8;
}}
int main(void) {{
  ncclCollConfig_t config = nccl_config_0();
  printf("{"%d " * len(values)}%s", {arguments});
  return {call};
}}
""")
    command = [compiler, "-Wall", "-Wextra", "-Werror", f"-I{path.parent}", f"-I{tmp_path}", "main.c", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "8 2 4 1 1 ring"
