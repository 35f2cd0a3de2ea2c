from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from overlap_sweep.report.page import environment
from overlap_sweep.report.page.answers import answers, scaling_sentence
from overlap_sweep.report.page.figures import script_safe
from overlap_sweep.report.page.palette import COLOURS, chart_config, colour, in_light, style_sheet
from tests.made_sweeps import BEST_SLOTS, rounds, write_operators, write_sweep, write_tuned_sweep
from tests.make_point import layer_config, make_point, operator_config, pass_times
from tests.report.page.reports import analysis_of, files_of, page_of, parsed
from tests.report.page.sweep_of_300 import write_sweep_of_300

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'`\u2028"


def test_needs_nothing_from_anywhere(tmp_path: Path) -> None:
    page = parsed(page_of(write_sweep(tmp_path)))
    assert all(not re.match(r"(?i)[a-z]+:|//", address) or address == "data:," for address in page.addresses)
    in_styles = re.findall(r"url\(\s*['\"]?([^)]{0,10})", "".join(page.styles))
    assert all(address.startswith("data:") for address in in_styles)
    assert "@import" not in "".join(page.styles)


def test_of_300_points_is_small(tmp_path: Path) -> None:
    page = page_of(write_sweep_of_300(tmp_path))
    assert len(page.encode()) < 5e6
    assert len(parsed(page).scripts) > 30


def test_the_answer_comes_first(tmp_path: Path) -> None:
    page = parsed(page_of(write_tuned_sweep(tmp_path)))
    text = " ".join(" ".join(page.text).split())
    said = [
        "TP=4",
        "9.5% faster than no overlap",
        "optimal_tp_comm_overlap_cfg_tp4.yaml",
        "use tuned.",
        "The whole layer: 55.11",
        "How sure",
        "7 rounds side by side",
        "How much communication is hidden",
    ]
    places = [text.index(one) for one in said]
    assert places == sorted(places)
    assert "optimal_tp_comm_overlap_cfg_tp4.yaml" in page.addresses


def text_of(directory: Path) -> str:
    return " ".join(" ".join(parsed(page_of(directory)).text).split())


def test_both_comparisons_have_their_interval(tmp_path: Path) -> None:
    (answer,) = answers(analysis_of(write_tuned_sweep(tmp_path)).cases[0], "")
    proven = answer.sure[0]
    assert "95% intervals" in proven
    assert "the time tuned over that of no overlap is 0.905 (" in proven
    assert "over that of the default, the fastest of the others, is 0.953 (" in proven


def test_a_file_that_is_not_the_best_one_by_one_says_why(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "same")
    assert "not the best of each operator measured alone" not in text_of(tmp_path / "same")
    taken = {"settings": {**BEST_SLOTS, "fc2_fprop": {"method": "pipeline", "num_sm": 16}}}
    write_tuned_sweep(tmp_path / "other", changed={"tuned": taken})
    assert "it differs in fc2_fprop, since" in text_of(tmp_path / "other")


def test_the_tp_size_is_one_plain_sentence(tmp_path: Path) -> None:
    said = scaling_sentence(analysis_of(write_sweep(tmp_path / "sweep")).cases[0])
    assert said == (
        "Use TP=2: of the TP sizes that were measured it is the largest that scales efficiently (sum over fc1; TP=1 "
        "takes 1,000.0 us, TP=2 takes 520.0, which is 1.04 times the ideal)."
    )
    make_point("operator", tmp_path / "one", operator_config(2, "fc1", "all", "bulk", num_sm=4))
    assert scaling_sentence(analysis_of(tmp_path / "one").cases[0]) == (
        "TP size undecided: TP=1 was not measured, so there is nothing to scale from."
    )


def test_environments_are_written_as_people_write_them() -> None:
    rows = dict(
        environment.rows_of({"cudnn": 91900, "topology": ["GPU0\tX", "GPU1\tNV18"], "gpu": "H200", "nccl": None})
    )
    assert rows == {"cuDNN": "9.19.0", "topology": "GPU0\tX\nGPU1\tNV18", "GPU": "H200"}
    assert dict(environment.rows_of({"cudnn": 8907})) == {"cuDNN": "8.9.7"}


def test_a_sweep_of_operators(tmp_path: Path) -> None:
    text = " ".join(" ".join(parsed(page_of(write_sweep(tmp_path))).text).split())
    assert "1.19x no overlap" in text
    assert "fc1, fc2 fwd: 670.0 us instead of 800.0; GEMMs alone take 500.0 us, so 43% of the communication" in text
    assert "Don't overlap" in text
    assert "[rank3] out of memory" in text
    assert "NVIDIA H200" in text
    assert "python launch.py -m tp_size=2,4,8" in text
    assert "python analyze.py there" in text


def test_whatever_is_said_stays_text(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), status="failed", error=NASTY)
    model = "org/</script><b>x"
    times = {"fwd": pass_times(90.0, 100.0), "bwd": pass_times(180.0, 200.0, 150.0)}
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4, model=model), warnings=[NASTY], **times
    )
    page = parsed(page_of(tmp_path))
    assert sum(NASTY.strip() in text or "alert(1)</script><img src=x" in text for text in page.text) >= 2
    assert not [tag for tag, _ in page.tags if tag in ("img", "b")]
    assert not [script for script in page.scripts if script.startswith("alert")]


def test_no_point_is_ok(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), status="failed", error="out of memory"
    )
    files = files_of(tmp_path)
    text = " ".join(parsed(files["report.html"].decode()).text)
    assert "No answer" in text
    assert "out of memory" in text
    assert files.keys() == {"report.html"}


def test_only_layers(tmp_path: Path) -> None:
    variants = {"none": rounds(1.0), "default": rounds(0.97), "floor": rounds(0.8)}
    make_point("layer", tmp_path, layer_config(), variants=variants)
    make_point("layer", tmp_path, layer_config(), variants={}, name="broken", status="failed", error="out of memory")
    files = files_of(tmp_path)
    text = " ".join(parsed(files["report.html"].decode()).text)
    assert "default is 3.0% faster than none" in text
    assert "out of memory" in text
    assert files.keys() == {"report.html", "plots/layer_1.png"}


def test_several_cases_have_a_section_and_a_folder_each(tmp_path: Path) -> None:
    write_sweep(tmp_path / "one")
    write_operators(tmp_path / "other")
    files = files_of(tmp_path)
    page = parsed(files["report.html"].decode())
    assert [attrs["id"] for _, attrs in page.tags if attrs.get("class") == "case"] == ["case-1", "case-2"]
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    folders = {name.partition("/")[0] for name in files} - {"report.html"}
    assert folders == {
        "llama3_8b_megatron_NVIDIA-H200_bf16_tokens8192",
        "llama3_8b_transformer_engine_NVIDIA-H200_bf16_tokens8192",
    }


def test_charts_can_be_heard(tmp_path: Path) -> None:
    page = parsed(page_of(write_sweep(tmp_path)))
    labels = {attrs["id"]: attrs["aria-label"] or "" for tag, attrs in page.tags if tag == "figure"}
    assert "fc1_dgrad + wgrad 80% by bulk_sm4, 1.25x" in labels["hidden_fraction_tp2"]
    assert "chosen: bulk_sm4, 320.0 us, 1.25x, hides 80%" in labels["num_sm_tp2_fc1_bwd"]
    assert all(labels.values())


def test_colours_are_those_of_the_palette() -> None:
    text = json.dumps(chart_config())
    assert set(re.findall(r"var\(--([a-z0-9]+)\)", text)) <= COLOURS.keys()
    assert "var(" not in in_light(text)
    assert "#fff" not in text
    assert all(f"--{name}: light-dark(" in style_sheet() for name in COLOURS)
    with pytest.raises(KeyError):
        colour("mauve")


def test_json_within_a_script_ends_it_nowhere() -> None:
    text = script_safe(json.dumps({"said": NASTY + "<!--"}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"said": NASTY + "<!--"}
