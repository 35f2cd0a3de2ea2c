from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from overlap_sweep.analysis.layers import analyse_layer
from overlap_sweep.report.console import console_for
from overlap_sweep.report.layers import cautions, print_layer, title, verdict
from overlap_sweep.run_directory import VariantTimes
from tests.analysis.reading import layer_point
from tests.make_point import layer_config, make_point, variant


def rounds(*ratios: float) -> VariantTimes:
    """Six rounds that take these ratios of 60 ms, in turns."""
    return variant([60_000.0 * ratios[i % len(ratios)] for i in range(6)])


BOUND = variant([60_000.0] * 6, launch_bound=True)


def shown(directory: Path, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width, highlight=False, markup=False)
    print_layer(layer_point(directory), console)
    return stream.getvalue()


def test_the_title_says_what_was_measured_on_what(tmp_path: Path) -> None:
    make_point("layer", tmp_path / "a", variants={"none": rounds(1.0)}, attention_backend="fused (cuDNN 9.19.0)")
    assert title(layer_point(tmp_path / "a")) == (
        "llama3_8b transformer_layer, TP=4, 8192 tokens, bf16, backend megatron on NVIDIA H200, "
        "attention fused (cuDNN 9.19.0)"
    )
    make_point("layer", tmp_path / "b", layer_config("linear", 2, num_replicas=2), variants={"none": rounds(1.0)})
    assert title(layer_point(tmp_path / "b")).startswith("llama3_8b linear, TP=2, 2 replicas, 8192 tokens")


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (
            {"none": rounds(1.0), "default": rounds(0.99, 1.01), "file:best.yaml": rounds(0.962, 0.966, 0.969)},
            "file:best.yaml is 3.4% faster than none (3.1 to 3.8%); default is no different",
        ),
        (
            {"none": rounds(1.0), "floor": rounds(0.5), "default": rounds(1.04), "file:a": rounds(0.99, 1.01)},
            "nothing is faster than none: file:a is no different; default is 4.0% slower (4.0 to 4.0%)",
        ),
        (
            {"default": rounds(1.0), "file:a": rounds(0.9)},
            "file:a is 10.0% faster than default (10.0 to 10.0%)",
        ),
        ({"none": rounds(1.0), "floor": rounds(0.5)}, "no verdict: there is nothing to compare none with"),
        (
            {"none": BOUND, "default": rounds(0.5)},
            "no verdict: none was launch-bound, its time says nothing about the device",
        ),
        ({"none": rounds(1.0), "default": BOUND, "file:a": rounds(1.0)}, "nothing is faster than none: file:a is no "),
    ],
)
def test_the_verdict(tmp_path: Path, variants: dict[str, VariantTimes], expected: str) -> None:
    make_point("layer", tmp_path, variants=variants)
    found = verdict(analyse_layer(layer_point(tmp_path)))
    assert found.startswith(expected)
    assert "floor" not in found


def test_the_table_has_a_line_for_each_variant(tmp_path: Path) -> None:
    variants = {
        "none": variant([60_000.0] * 6),
        "floor": variant([50_000.0] * 6),
        "default": variant([57_000.0] * 6, launch_bound=True),
    }
    make_point("layer", tmp_path, variants=variants)
    lines = shown(tmp_path).splitlines()
    assert next(line for line in lines if "variant" in line).split() == [
        "variant", "fwd", "ms", "bwd", "ms", "all", "ms", "vs", "none", "hidden", "note",
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith(" none")).split() == [
        "none", "20.000", "40.000", "60.000", "1.000", "0%",
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith(" default")).split() == [
        "default", "19.000", "38.000", "57.000", "0.950", "[0.950,", "0.950]", "30%", "launch-bound",
    ]  # fmt: skip
    assert any("ratio to none in the same round, median of 6 rounds [95% interval]" in line for line in lines)


def test_the_optimizers_step_has_a_column_where_there_is_one(tmp_path: Path) -> None:
    make_point("layer", tmp_path, variants={"none": variant([60_000.0] * 6, step_us=1234.0)})
    text = shown(tmp_path)
    assert "step ms" in text
    assert "1.234" in text
    assert "note" not in text


def test_what_to_know_before_believing_it(tmp_path: Path) -> None:
    variants = {"default": variant([100.0] * 3), "file:a": variant([90.0] * 3, launch_bound=True)}
    make_point("layer", tmp_path, variants=variants, warnings=["GPU 3 was throttled."])
    assert cautions(analyse_layer(layer_point(tmp_path))) == [
        "none was not measured: ratios are to default.",
        "3 rounds are too few for 95%: the intervals, from the lowest to the highest ratio, hold with 75%.",
        "Launch-bound, left out of the verdict: file:a.",
        "GPU 3 was throttled.",
    ]
    assert "[75% interval]" in shown(tmp_path)


def test_nothing_to_know_where_all_is_well(tmp_path: Path) -> None:
    make_point("layer", tmp_path, variants={"none": rounds(1.0), "default": rounds(0.9)})
    assert cautions(analyse_layer(layer_point(tmp_path))) == []


@pytest.mark.parametrize("width", [40, 79, 200])
def test_a_terminal_of_any_width_shows_everything(tmp_path: Path, width: int) -> None:
    variants = {
        "none": variant([60_000.0] * 6, step_us=1234.0),
        "file:optimal_tp_comm_overlap_cfg_tp4.yaml": variant([54_000.0] * 6, step_us=1234.0, launch_bound=True),
    }
    make_point("layer", tmp_path, variants=variants)
    text = shown(tmp_path, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for expected in ("60.000", "20.000", "1.234", "0.900 [0.900, 0.900]", "launch-bound"):
        assert expected in text
    # Wrapped where it must be, but whole.
    assert "file:optimal_tp_comm_overlap_cfg_tp4.yaml" in text.replace("\n", "")
