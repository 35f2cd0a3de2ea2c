"""Levers are taken as they are typed, with and without Hydra's `+`; what is wrong with one is one line that helps."""

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_key
from tests.workloads.job.commands import COMMAND, point

BUCKET = "job.levers.ddp.bucket_cap_mb"


@pytest.mark.parametrize(
    "typed",
    [
        *(f"{plus}{BUCKET}=25" for plus in ("", "+", "++")),
        *(f"{plus}job.levers={{ddp:{{bucket_cap_mb:25}}}}" for plus in ("", "+")),
        "job.levers={ddp.bucket_cap_mb:25}",
    ],
)
def test_each_spelling_is_the_same_point(typed: str) -> None:
    made = point(COMMAND, typed)
    assert made.job.levers == {"ddp": {"bucket_cap_mb": 25}}
    assert point_key(made) == point_key(point(COMMAND, f"+{BUCKET}=25"))


def test_levers_of_several_families_are_typed_in_one_map() -> None:
    made = point(COMMAND, "job.levers={ddp.bucket_cap_mb:25,loader:{num_workers:2},ddp.static_graph:null}")
    assert made.job.levers == {"ddp": {"bucket_cap_mb": 25, "static_graph": None}, "loader": {"num_workers": 2}}


@pytest.mark.parametrize(
    ("typed", "said"),
    {
        f"{BUCKET[:-3]}=25": "job.levers.ddp.bucket_cap is not known. Did you mean ddp.bucket_cap_mb?",
        f"+{BUCKET[:-3]}=null": "job.levers.ddp.bucket_cap is not known. Did you mean ddp.bucket_cap_mb?",
        "job.levers.ddp=25": "job.levers.ddp is not known. Did you mean ddp.bucket_cap_mb?",
        "job.levers.ddp=null": "job.levers.ddp is not known. Did you mean ddp.bucket_cap_mb?",
        "job.levers.mine.chunk_mb=4": "job.levers.mine.chunk_mb is not known. `analyze.py levers` lists them.",
        f"{BUCKET}=big": f"{BUCKET}=big is not a number, such as 1.",
        f"{BUCKET}=true": f"{BUCKET}=true is not a number, such as 1.",
        f"{BUCKET}=-1": f"{BUCKET}=-1 is out of range; give such as 1.",
        f"{BUCKET}=inf": f"{BUCKET}=inf is out of range; give such as 1.",
        f"{BUCKET}=[25,4]": f"{BUCKET}=[25, 4] is a list; give one value, or several with -m and without brackets.",
        "job.levers.nccl.cta_policy=true": "job.levers.nccl.cta_policy=true is not one of 0, 1, 2.",
        "job.levers.ddp.static_graph=1": "job.levers.ddp.static_graph=1 is not a boolean, such as true.",
        "job.levers={ddp.bucket_cap_mb:25,ddp:{bucket_cap_mb:4}}": f"{BUCKET} is given twice; give it once.",
        "job.levers={ddp.bucket_cap_mb:25,ddp:{bucket_cap_mb:null}}": f"{BUCKET} is given twice; give it once.",
        "job.levers=none": "job.levers=none is not a map; give +job.levers.<name>=... .",
        "job.levers=null": "job.levers=null is not a map; give +job.levers.<name>=... .",
    }.items(),
)
def test_what_is_wrong_is_said_in_one_line(typed: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        point(COMMAND, typed)
    assert str(raised.value) == said
