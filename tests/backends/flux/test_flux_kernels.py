"""The Flux adapter against a module of Flux's names and signatures that computes through gloo; see fake/."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from overlap_sweep.backends import flux as kernels
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from tests.make_point import resolved
from tests.processes import run_ranks

FAKE = Path(__file__).parent / "fake"
HOPPER, ADA, AMPERE, BLACKWELL = (9, 0), (8, 9), (8, 0), (10, 0)


def flux_point(kernel: str, precision: str = "fp16", **changes: Any) -> Any:
    sizes = {"m": 48, "n": 96, "k": 32, "tp_size": 2, **changes}
    return resolved("kernel", kernel=kernel, precision=precision, backend="flux", **sizes)


def _become(capability: tuple[int, int]) -> Any:
    """Have this process see the fake Flux and a GPU of that compute capability; the fake."""
    import torch

    if str(FAKE) not in sys.path:
        sys.path.insert(0, str(FAKE))
    torch.cuda.get_device_capability = lambda device=None: capability  # type: ignore[assignment]
    import flux.cpp_mod

    return flux.cpp_mod


def computed(
    ranks: Ranks, capability: tuple[int, int], precision: str, names: dict[str, list[str]]
) -> tuple[dict[str, float | str], list[str], int, dict[str, str]]:
    """By name the error, or why it was refused; what Flux was called with; what it holds after all points were closed;
    its environment."""
    import gc
    import weakref

    from overlap_sweep.workloads.kernel import run as kernel_run

    fake = _become(capability)
    fake.CALLS.clear()
    found: dict[str, float | str] = {}
    held = []
    for kernel, of_kernel in names.items():
        point = flux_point(kernel, precision)
        problem = kernel_run.draw_problem(point, ranks)
        built = {}
        for name in of_kernel:
            setting = kernels.named(point, name)
            assert setting is not None, name
            try:
                built[name] = kernels.build(point, setting, problem, ranks)
            except Refused as reason:
                found[name] = str(reason)
        found |= {name: kernel_run.check(call, problem, ranks).error for name, call in built.items()}
        held += [weakref.ref(one) for one in fake.ALLOCATED]
        fake.ALLOCATED.clear()
        kernels.close()
        del problem
    gc.collect()
    return (
        found,
        fake.CALLS,
        sum(one() is not None for one in held),
        {n: os.environ.get(n, "") for n in kernels.NVSHMEM},
    )


def listed(precision: str, transposed: bool = True) -> dict[str, list[str]]:
    names = {kernel: list(kernels.implementations(flux_point(kernel, precision))) for kernel in ("ag_gemm", "gemm_rs")}
    if transposed:
        names = {kernel: of + [name + kernels.TRANSPOSED for name in of] for kernel, of in names.items()}
    return names


@pytest.mark.parametrize("capability", [HOPPER, AMPERE], ids=["sm90", "sm80"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_all_implementations_compute_the_kernel(capability: tuple[int, int], precision: str) -> None:
    names = listed(precision)
    for found, _, held, _ in run_ranks(2, computed, capability, precision, names, keep="flux"):
        assert set(found) == {name for of_kernel in names.values() for name in of_kernel}
        assert all(isinstance(error, float) and error < 1e-2 for error in found.values()), found
        assert not held, "close frees what the ranks share, while what was built is still there"


def test_settings_reach_flux_and_share_one_buffer() -> None:
    names = {"ag_gemm": ["all_to_all_ce1", "ring_ce1", "ring_ce0_transposed"], "gemm_rs": ["scatter", "scatter_fused"]}
    _, calls, _, environment = run_ranks(2, computed, HOPPER, "fp16", names, keep="flux")[0]
    assert list(dict.fromkeys(calls)) == [
        "All2All cuda_core=False transposed=False",
        "Ring1D cuda_core=False transposed=False",
        "Ring1D cuda_core=True transposed=True",
        "fused=False transposed=False",
        "fused=True transposed=False",
    ]
    assert environment["NVSHMEM_DISABLE_CUDA_VMM"] == "1"


@pytest.mark.parametrize(
    ("capability", "precision", "names", "refused"),
    [
        (ADA, "fp8", None, None),
        (HOPPER, "fp8", None, "Flux has FP8 for compute capability 8.9 only, but this GPU has 9.0"),
        (
            *(BLACKWELL, "fp16", {"gemm_rs": ["scatter"]}),
            "Flux runs on GPUs of compute capability 8.0, 8.9, 9.0, but this GPU has 10.0",
        ),
    ],
    ids=["fp8 on sm89", "fp8 on sm90", "sm100"],
)
def test_fp8_is_scaled_where_flux_has_it_and_other_gpus_are_refused(
    capability: tuple[int, int], precision: str, names: dict[str, list[str]] | None, refused: str | None
) -> None:
    names = names or listed(precision, transposed=False)
    for found, *_ in run_ranks(2, computed, capability, precision, names, keep="flux"):
        for error in found.values():
            assert error == refused if refused else isinstance(error, float) and error < 1e-2


def refused_by_flux(ranks: Ranks, what: str) -> str:
    """Why nothing can be built, with a Flux that lacks something."""
    from overlap_sweep.workloads.kernel import run as kernel_run

    fake = _become(HOPPER)
    import flux

    point = flux_point("gemm_rs")
    problem = kernel_run.draw_problem(point, ranks)
    with pytest.MonkeyPatch.context() as patched:
        if what == "not compiled":
            patched.setattr(flux, "GemmRS", fake.NotCompiled())
        elif what == "not importable":
            patched.delitem(sys.modules, "flux")
            patched.setitem(sys.modules, "flux.cpp_mod", None)
        elif what == "no kernel":
            unknown = "No registered hparams found for meta:GemmMeta"
            patched.setattr(fake, "_check_compiled", lambda *_: fake._check(False, unknown))
        else:
            error = RuntimeError("CUDA error: an illegal memory access")
            patched.setattr(fake, "_product", Mock(side_effect=error))
        try:
            kernels.build(point, {"method": "scatter"}, problem, ranks)
        except Refused as reason:
            return str(reason)
        except RuntimeError as error:
            return f"raised {error}"
        finally:
            kernels.close()
    return "built"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("not compiled", f"Flux 1.1.1 has no GemmRS; install 1.1.1: {kernels.INSTALL}"),
        ("no kernel", "Flux: /flux/src/fake.cc:1 Check failed: condition. No registered hparams found for"),
        ("not importable", "Flux cannot be imported (import of flux.cpp_mod halted; None in sys.modules)"),
        ("a CUDA error", "raised CUDA error: an illegal memory access"),
    ],
)
def test_what_flux_lacks_is_refused_and_what_fails_is_not(what: str, said: str) -> None:
    for reason in run_ranks(2, refused_by_flux, what, keep="flux"):
        assert reason.startswith(said)
        assert "\n" not in reason


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have this process find the packages of a folder, as if nothing had been looked for before."""

    def find(folder: Path) -> None:
        monkeypatch.syspath_prepend(str(folder))
        kernels.missing.cache_clear()

    yield find
    kernels.missing.cache_clear()


@pytest.mark.skipif(find_spec("flux") is not None, reason="a flux is installed")
@pytest.mark.parametrize(
    ("file", "said"),
    [
        (None, "Flux is not installed; pip install --no-build-isolation byte-flux==1.1.1"),
        *((name, "is not ByteDance's Flux, or has no compiled part; pip") for name in ("flux.py", "flux/a/b.py")),
    ],
)
def test_what_is_there_instead_is_named_without_importing_it(
    installed: Any, tmp_path: Path, file: str | None, said: str
) -> None:
    if file:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise SystemExit('imported')\n")
    installed(tmp_path)
    assert said in str(kernels.refusal(flux_point("ag_gemm")))


def test_what_is_refused_of_fp8_and_whose_names_are_known(installed: Any) -> None:
    """What else is refused, and which names it has, is in tests/golden/expected/refusals/kernel.txt."""
    installed(FAKE)
    assert kernels.refusal(flux_point("ag_gemm")) is None
    rows = "Flux requires rows of a multiple of 16 bytes, but a rank's weight has 24 inputs"
    assert kernels.refusal(flux_point("ag_gemm", "fp8", k=24)) == rows
    transposed = {"method": "ring_exchange", "use_ce": False, "transpose_weight": True}
    assert kernels.named(flux_point("ag_gemm", "bf16"), "ring_ce0_transposed") == transposed
    assert kernels.named(flux_point("ag_gemm", "bf16"), "scatter") is None
    assert kernels.named(flux_point("ag_gemm", "fp8"), "ring_ce0_transposed") is None
