"""What forms say of settings, what they leave out, and why."""

import subprocess

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.nccl.settings import Algorithm, GroupSetting
from overlap_sweep.nccl.written import FORMS, written
from tests.nccl.settings import DP, EVERYWHERE, LARGE, TP, one


def rows(*settings: GroupSetting, multicast: bool = False) -> list[str]:
    lines = one("tuner", *settings, multicast=multicast).text.splitlines()
    return [line for line in lines if not line.startswith("#")]


def variables(*settings: GroupSetting) -> dict[str, str]:
    text = one("environment", *settings).text
    said = subprocess.run(
        ["env", "-i", "bash", "-c", f"{text}\nenv"], capture_output=True, text=True, check=True
    ).stdout
    return {name: value for name, _, value in (line.partition("=") for line in said.splitlines()) if "NCCL" in name}


def test_every_form_says_something_or_why_not() -> None:
    for found in written([TP, DP, EVERYWHERE, LARGE], nccl="2.31.2"):
        assert found.text
        assert found.left_out
        assert found.warnings
    assert [(found.text, found.left_out) for found in written([])] == [("", [])] * len(FORMS)


def test_a_variable_serves_all_groups() -> None:
    assert variables(EVERYWHERE) == {
        "NCCL_MAX_CTAS": "16",
        "NCCL_ALGO": "ring",
        "NCCL_PROTO": "simple",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    }
    assert one("environment", TP).left_out == [f"{TP.group}: variables are for all process groups and sizes."]


def test_equal_settings_of_several_groups_are_variables() -> None:
    alike = [GroupSetting(description=name, max_ctas=4) for name in ("dp", "tp")]
    assert variables(*alike) == {"NCCL_MAX_CTAS": "4"}
    assert variables(*alike[:1]) == {}
    assert variables(*alike, GroupSetting(description="pp", max_ctas=8)) == {}


def test_algorithms_are_for_the_collectives_that_have_them() -> None:
    tree = GroupSetting(algorithm="tree", protocol="ll")
    assert variables(tree) == {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "allreduce:ll"}
    assert variables(GroupSetting(collective="all_reduce", algorithm="tree"), EVERYWHERE)["NCCL_ALGO"] == (
        "ring;allreduce:tree"
    )
    assert rows(tree) == ["allreduce,0,18446744073709551615,tree,ll,0,-1,-1"]
    with pytest.raises(UserError, match="no tree for all_gather; give one of ring"):
        GroupSetting(collective="all_gather", algorithm="tree")


@pytest.mark.parametrize("algorithm", ["nvls", "nvls_tree"])
def test_multicast_is_left_out_unless_allowed(algorithm: Algorithm) -> None:
    setting = GroupSetting(size=8, collective="all_reduce", algorithm=algorithm, protocol="simple", max_ctas=4)
    for found in written([setting], nccl="2.31.2"):
        assert found.text == ""
        assert "runtime.multicast=true" in found.left_out[0]
    assert rows(setting, multicast=True) == [f"allreduce,0,18446744073709551615,{algorithm},simple,4,-1,8"]


def test_forms_for_groups_leave_out_what_is_for_part_of_them() -> None:
    for form in ("megatron", "pytorch"):
        found = one(form, DP, LARGE)
        assert "max_ctas: 2" in found.text or "max_ctas = 2" in found.text
        assert found.left_out == [f"{LARGE.label}: the form is for all collectives of a group, of any size."]


def test_groups_that_a_form_cannot_tell_apart_get_no_value_of_another() -> None:
    gathers = GroupSetting(description="DATA_PARALLEL_GROUP_WITH_CP_AG", max_ctas=1)
    found = one("megatron", DP, gathers)
    assert found.left_out == [f"{gathers.label}: cannot be told apart from {DP.label}, which has other values."]
    assert one("pytorch", DP, gathers).left_out == []

    of_experts = GroupSetting(
        description="ep", size=4, collective="reduce_scatter", algorithm="ring", protocol="simple", max_ctas=1
    )
    assert len(rows(LARGE, of_experts)) == 1
    assert "cannot be told apart" in one("tuner", LARGE, of_experts).left_out[0]


def test_rows_need_what_selects_and_what_is_chosen() -> None:
    assert "algorithm and a protocol" in one("tuner", GroupSetting(size=4, algorithm="ring")).left_out[0]
    unknown = GroupSetting(description="dp", algorithm="ring", protocol="ll")
    assert "number of ranks" in one("tuner", unknown).left_out[0]
    assert rows(EVERYWHERE, LARGE)[0] == "reducescatter,1048576,18446744073709551615,ring,ll128,4,-1,4"
    assert len(rows(EVERYWHERE)) == 5


def test_lines_are_as_short_as_the_plugin_reads_them() -> None:
    many = GroupSetting(ranks=tuple(range(512)), algorithm="ring", protocol="simple")
    assert all(len(line) < 255 for line in one("tuner", many).text.splitlines())


def test_per_collective_configuration_needs_its_nccl() -> None:
    assert one("per_collective", LARGE, nccl="2.31.2").text
    for version in ("2.30.7", ""):
        assert one("per_collective", LARGE, nccl=version).text == ""
    assert one("per_collective", LARGE, nccl="2.30.7").left_out == [f"{LARGE.label}: needs NCCL 2.31, not 2.30.7."]


def test_the_fewest_thread_blocks_come_with_the_most_where_nccl_refuses_them_alone() -> None:
    (options,) = written([GroupSetting(description="mesh_dp", size=2, min_ctas=48)], ["pytorch"])
    lines = options.text.splitlines()
    assert [line.partition(".config.")[2] for line in lines if ".config." in line] == ["min_ctas = 48", "max_ctas = 48"]
    (shell,) = written([GroupSetting(min_ctas=48)], ["environment"])
    assert shell.text == "export NCCL_MIN_CTAS=48\n"


def test_a_setting_is_refused_that_cannot_be() -> None:
    with pytest.raises(UserError, match="min_ctas=8 exceeds max_ctas=4"):
        GroupSetting(min_ctas=8, max_ctas=4)
