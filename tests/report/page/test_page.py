"""The page as a whole: whatever it is about, and what it is made of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import altair as alt
import pytest

from overlap_sweep.report.page import environment
from overlap_sweep.report.page.figures import script_safe
from overlap_sweep.report.page.palette import COLOURS, chart_config, colour, in_light, style_sheet
from overlap_sweep.report.page.points_table import points_table
from tests.analyze import analyze
from tests.golden.made_report import write_every_workload, write_traced
from tests.made_sweeps import (
    write_operators,
    write_sweep,
    write_sweep_of_copies,
    write_sweep_of_kernels,
    write_sweep_of_training,
)
from tests.make_point import make_point, missing_point, operator_config, pass_times
from tests.report.commands.test_compare import DEFAULT, NONE
from tests.report.conftest import Made
from tests.report.page.reports import Parsed, analysis_of, files_of, page_of, parsed


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of every workload, with timelines."""
    directory = tmp_path_factory.mktemp("everything")
    write_every_workload(directory)
    write_traced(directory / "traced")
    path = directory / "report.html"
    path.write_text(page_of(directory))
    return path


@pytest.fixture(scope="module")
def page(everything: Path) -> Parsed:
    return parsed(everything.read_text())


def test_needs_nothing_from_anywhere(page: Parsed) -> None:
    assert all(not re.match(r"(?i)[a-z]+:|//", address) or address == "data:," for address in page.addresses)
    in_styles = re.findall(r"url\(\s*['\"]?([^)]{0,10})", "".join(page.styles))
    assert all(address.startswith("data:") for address in in_styles)
    assert "@import" not in "".join(page.styles)


def test_every_link_leads_somewhere_and_every_chart_can_be_heard(page: Parsed) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {"kernels", "training", "copies", "stacks", "points-table", "kernels-table", "steps-table"} <= set(ids)
    assert {address.removeprefix("#") for address in page.addresses if address.startswith("#")} - set(ids) == set()
    labels = {attributes["id"]: attributes["aria-label"] for tag, attributes in page.tags if tag == "figure"}
    assert len(labels) > 15
    assert all(labels.values())


def test_every_kind_of_chart_is_what_vega_lite_takes(page: Parsed, made: Made, tmp_path: Path) -> None:
    of_page = [script for script in page.scripts if '"$schema"' in script]
    names = [attributes["id"] or "" for tag, attributes in page.tags if tag == "figure"]
    found = {
        re.sub("case[0-9]_|_tp[248].*|_n[0-9].*", "", name): spec for name, spec in zip(names, of_page, strict=True)
    }
    for kind, pair in {"points": ("old", "new"), "runs": ("cuda", "rocm"), "traces": (NONE, DEFAULT)}.items():
        analyze("compare", *(made("compared") / one for one in pair), "--output", tmp_path / kind)
        found |= {f"{kind} {path.name}": path.read_text() for path in (tmp_path / kind).glob("*.png")}
    assert len(found) > 18
    for text in found.values():
        spec = json.loads(text)
        (alt.TopLevelVConcatSpec if "vconcat" in spec else alt.TopLevelLayerSpec).validate(spec)


def test_of_operators_all_is_the_same_beside_others(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    alone = analysis_of(tmp_path)
    for write in (write_sweep_of_kernels, write_sweep_of_training, write_sweep_of_copies):
        write(tmp_path / write.__name__)
    beside = analysis_of(tmp_path)
    assert beside.rows == alone.rows
    assert [(case.case, case.plans, case.drift) for case in beside.cases] == [
        (case.case, case.plans, case.drift) for case in alone.cases
    ]


def test_several_cases_have_a_section_and_a_folder_each(tmp_path: Path) -> None:
    write_sweep(tmp_path / "one")
    write_operators(tmp_path / "other")
    files = files_of(tmp_path)
    found = parsed(files["report.html"].decode())
    assert [attrs["id"] for _, attrs in found.tags if attrs.get("class") == "case"] == ["case-1", "case-2"]
    assert {name.partition("/")[0] for name in files} - {"report.html"} == {
        f"llama3_8b_{backend}_NVIDIA-H200_bf16_tokens8192" for backend in ("megatron", "transformer_engine")
    }


def test_points_are_rows_that_sort_as_numbers_and_cases_a_column_where_there_are_several(tmp_path: Path) -> None:
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    make_point("operator", tmp_path, bulk, bwd=pass_times(12345.678, 20000.0, 10000.0))
    # What died makes no other case.
    missing_point(tmp_path, {**bulk, "num_sm": 8})
    table = points_table(analysis_of(tmp_path))
    cell = table.rows[0][table.columns.index("time us")]
    assert (cell.text, cell.order, "case" in table.columns) == ("12,345.7", 12345.678, False)
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4, tokens=4096))
    table = points_table(analysis_of(tmp_path))
    assert table.columns[0] == "case"
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_environments_are_written_as_people_write_them() -> None:
    given = {"cudnn": 91900, "topology": ["GPU0\tX", "GPU1\tNV18"], "gpu": "H200", "nccl": None}
    rows = dict(environment.rows_of(given))
    assert rows == {"cuDNN": "9.19.0", "topology": "GPU0\tX\nGPU1\tNV18", "GPU": "H200"}
    assert dict(environment.rows_of({"cudnn": 8907})) == {"cuDNN": "8.9.7"}


def test_colours_are_those_of_the_palette() -> None:
    text = json.dumps(chart_config())
    assert set(re.findall(r"var\(--([a-z0-9]+)\)", text)) <= COLOURS.keys()
    assert "var(" not in in_light(text)
    assert "#fff" not in text
    assert all(f"--{name}: light-dark(" in style_sheet() for name in COLOURS)
    with pytest.raises(KeyError):
        colour("mauve")


def test_json_within_a_script_ends_it_nowhere() -> None:
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'`\u2028<!--"
    text = script_safe(json.dumps({"said": nasty}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"said": nasty}
