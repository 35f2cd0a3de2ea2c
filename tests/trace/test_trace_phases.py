"""Which iteration and pass events are given, on traces made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.trace import smallest_period
from overlap_sweep.trace.activity import BWD, FWD, NEITHER, NO_ITERATION, RECOMPUTE, activity_of
from overlap_sweep.trace.kineto import read_trace
from tests.timeline import Timeline
from tests.trace.conftest import analyse_trace


def assigned(trace: Timeline) -> dict[str, tuple[int, int]]:
    """Event name -> (iteration, pass)."""
    read = read_trace(trace.write())
    activity = activity_of(read)
    names = [read.labels[label][1] for label in activity.events.label]
    columns = zip(activity.assignment.iteration.tolist(), activity.assignment.pass_.tolist(), strict=True)
    return dict(zip(names, columns, strict=True))


def assert_assigned(trace: Timeline, launches: dict[int, tuple[int, int, int]]) -> None:
    """`launches`: by when a kernel is launched, the thread, and the iteration and pass that it must be given."""
    for at, (thread, _, _) in launches.items():
        trace.work(f"k{at}", at, thread=thread)
    assert assigned(trace) == {f"k{at}": (iteration, pass_) for at, (_, iteration, pass_) in launches.items()}


def rows_of(trace: Timeline) -> list[tuple[int, str, int, float]]:
    rows = analyse_trace(trace.write())
    return [(row.iteration, row.phase, row.num_gemm_events, row.active_us) for row in rows]


def test_a_launch_inside_autograd_on_its_own_thread_is_backward(trace: Timeline) -> None:
    trace.backward(100, 200, thread=2)
    # The last is at the very end, which is no part of it.
    assert_assigned(trace, {50: (1, 0, FWD), 100: (2, 0, BWD), 160: (1, 1, FWD), 199: (2, 1, BWD), 200: (2, 2, FWD)})


def test_iterations_turn_from_backward_to_forward_in_launch_order(trace: Timeline) -> None:
    for start in (0, 1000, 2000):
        trace.backward(start + 500, start + 600)
        for at, thread in ((100, 1), (200, 1), (550, 2), (560, 2)):
            # The GPU lags behind and runs streams in any order: only the launches tell.
            trace.work(f"k{start}-{at}", start + at, 9000 - start - at, thread=thread)
    assert assigned(trace) == {
        f"k{start}-{at}": (iteration, pass_)
        for iteration, start in enumerate((0, 1000, 2000))
        for at, pass_ in ((100, FWD), (200, FWD), (550, BWD), (560, BWD))
    }


def test_a_trace_that_starts_in_a_backward_pass(trace: Timeline) -> None:
    trace.backward(0, 100)
    assert_assigned(trace, {50: (2, 0, BWD), 150: (1, 1, FWD)})


def test_profiler_steps_name_the_iterations(trace: Timeline) -> None:
    # In a trace, the later may stand first; only whole names of steps are steps.
    trace.step(8, 200, 300)
    trace.step(7, 100, 200)
    trace.annotation("ProfilerStep#9 of another tool", 0, 400)
    # Two micro-batches in one step do not make two iterations.
    for start, end in ((120, 130), (150, 160), (220, 230)):
        trace.backward(start, end)
    launches = dict.fromkeys((50, 300, 350), (1, NO_ITERATION, FWD))
    launches |= {110: (1, 7, FWD), 125: (2, 7, BWD), 140: (1, 7, FWD), 155: (2, 7, BWD)}
    assert_assigned(trace, launches | {200: (1, 8, FWD), 225: (2, 8, BWD)})
    rows = {(row.iteration, row.phase): row for row in analyse_trace(trace.path)}
    assert [*rows] == [(iteration, phase) for iteration in (7, 8) for phase in ("fwd", "bwd", "all")]
    # Of several micro-batches the passes alternate: these 50 us are in both.
    assert [rows[7, phase].span_us for phase in ("fwd", "bwd")] == [35.0, 35.0]


def test_kernels_of_a_cuda_graph_share_the_launch_of_the_graph(trace: Timeline) -> None:
    trace.backward(100, 200)
    trace.launch(50, 1, name="cudaGraphLaunch")
    trace.launch(150, 2, thread=2, name="cudaGraphLaunch")
    nodes = {f"graph{graph}-node{node}": (graph, node) for graph in (1, 2) for node in range(3)}
    for name, (graph, node) in nodes.items():
        trace.on_device(name, 1000 * graph + 10 * node, 1000 * graph + 10 * node + 5, graph, stream=7 + node)
    assert assigned(trace) == {name: (0, FWD if graph == 1 else BWD) for name, (graph, _) in nodes.items()}


def test_an_event_without_launch_follows_the_one_before_it_on_its_stream_or_on_any(trace: Timeline) -> None:
    trace.backward(100, 200)
    trace.work("bwd elsewhere", 150, 1020, 1030, thread=2, stream=9)
    trace.work("fwd", 50, 1000, 1010)
    trace.work("next fwd", 250, 1100, 1110)
    trace.on_device("first of its stream", 1005, 1006, stream=8)
    trace.on_device("first of another", 1035, 1036, stream=10)
    trace.on_device("after fwd", 1040, 1050)
    trace.on_device("correlation of no launch", 1120, 1130, 99)
    trace.on_device("before everything", 900, 910, stream=8)
    # Launched before the recording began.
    trace.on_device("before all of its stream", 1010, 1012, stream=9)
    found = assigned(trace)
    assert {found.pop(name)[0] for name in ("before everything", "before all of its stream")} == {NO_ITERATION}
    assert found == {
        **dict.fromkeys(("fwd", "after fwd", "first of its stream"), (0, FWD)),
        **dict.fromkeys(("next fwd", "correlation of no launch"), (1, FWD)),
        **dict.fromkeys(("bwd elsewhere", "first of another"), (0, BWD)),
    }


def test_of_two_launches_with_one_correlation_the_first_counts(trace: Timeline) -> None:
    trace.backward(100, 200)
    trace.launch(150, 1, thread=2)
    trace.launch(50, 1)
    trace.on_device("k", 1000, 1010, 1)
    assert assigned(trace) == {"k": (0, FWD)}


def test_without_any_launch_everything_is_one_forward_pass(trace: Timeline) -> None:
    trace.on_device("nvjet_x", 0, 10)
    trace.on_device("ncclDevKernel_AllGather", 20, 30, 5)
    assert set(assigned(trace).values()) == {(0, FWD)}


@pytest.mark.parametrize("between", [(350,), (350, 405, 625)])
def test_optimizer_and_barrier_are_in_neither_pass(trace: Timeline, between: tuple[int, ...]) -> None:
    trace.backward(100, 200)
    trace.annotation("Optimizer.step#AdamW.step", 300, 400)
    trace.annotation("Optimizer.zero_grad#AdamW.zero_grad", 400, 410)
    trace.operator("c10d::barrier", 620, 630)
    launches = {50: (1, 0, FWD), 150: (2, 0, BWD), 700: (1, 1, FWD)}
    assert_assigned(trace, launches | dict.fromkeys(between, (1, 0, NEITHER)))


def test_a_copy_after_the_last_pass_starts_no_iteration(trace: Timeline) -> None:
    trace.backward(100, 200)
    trace.work("nvjet_1", 50)
    trace.work("nvjet_2", 150, thread=2)
    trace.work("Memcpy DtoH", 250)
    assert assigned(trace) == {"nvjet_1": (0, FWD), "nvjet_2": (0, BWD), "Memcpy DtoH": (0, FWD)}


@pytest.mark.parametrize("in_order", [True, False])
def test_cpu_spans_of_other_threads_are_in_the_pass_that_autograd_is_in(trace: Timeline, in_order: bool) -> None:
    for start in (0, 1000):
        trace.operator("c10d::_allgather_base_", start + 10, start + 12)
        trace.annotation(f"gloo:all_gather{start}", start + 15, start + 40, thread=5)
        trace.operator(f"aten::mm{start}", start + 50, start + 90)
        # In the gap between two backward functions it is still backward: nothing runs forward.
        trace.backward(start + 100, start + 150, thread=1)
        trace.annotation(f"gloo:all_reduce{start}", start + 140, start + 300, thread=5)
        trace.backward(start + 200, start + 220, thread=1)
        trace.annotation(f"gloo:send{start}", start + 230, start + 240, thread=6)
    trace.events = trace.events if in_order else trace.events[::-1]
    assert assigned(trace) == {
        f"{name}{start}": (iteration, pass_)
        for iteration, start in enumerate((0, 1000))
        for name, pass_ in {"gloo:all_gather": FWD, "aten::mm": FWD, "gloo:all_reduce": BWD, "gloo:send": BWD}.items()
    }


def test_cpu_trace_without_autograd_is_forward(trace: Timeline) -> None:
    trace.step(3, 0, 100)
    trace.operator("aten::mm", 10, 20)
    trace.annotation("gloo:all_gather", 15, 30, thread=5)
    assert assigned(trace) == {"aten::mm": (3, FWD), "gloo:all_gather": (3, FWD)}


def test_forward_and_backward_at_once_on_threads_of_their_own(trace: Timeline) -> None:
    trace.function("aten::mm", 35, 45, thread=1)
    trace.backward(35, 60, thread=2)
    trace.operator("aten::bmm", 35, 55, thread=2)
    trace.annotation("gloo:all_reduce", 40, 50, thread=9)
    assert assigned(trace) == {"aten::mm": (0, FWD), "aten::bmm": (0, BWD), "gloo:all_reduce": (0, BWD)}


def test_what_helping_threads_ran_forward_tells_nothing_of_spans(trace: Timeline) -> None:
    trace.function("aten::mm", 10, 20, thread=1)
    trace.backward(100, 200, thread=1)
    trace.function("aten::bmm", 140, 145, thread=3)
    trace.annotation("gloo:all_reduce", 150, 160, thread=5)
    assert assigned(trace)["gloo:all_reduce"] == (0, BWD)


def test_what_another_thread_computes_is_in_the_pass_that_autograd_is_in(trace: Timeline) -> None:
    for at in (10, 30):
        trace.function(f"aten::mm{at}", at, at + 10)
    trace.backward(100, 200, thread=1)
    trace.operator("aten::bmm", 150, 160, thread=8)
    assert assigned(trace) == {"aten::mm10": (0, FWD), "aten::mm30": (0, FWD), "aten::bmm": (0, BWD)}


def test_what_checkpoints_run_again_is_apart(trace: Timeline) -> None:
    trace.function("aten::mm", 10, 30)
    trace.backward(100, 400)
    # The operator of the backward pass itself notes the thread that ran forward.
    trace.add("cpu_op", "MmBackward0", 110, 390, 100, 2, **{"Sequence number": 7, "Fwd thread id": 1})
    trace.function("aten::mm", 120, 160, thread=2)
    trace.operator("aten::view", 170, 190, thread=2)
    trace.function("aten::mm", 200, 230, thread=9)
    launches = {20: (1, 0, FWD), 115: (2, 0, BWD), 130: (2, 0, RECOMPUTE), 180: (2, 0, BWD), 210: (2, 0, BWD)}
    # The last on a thread of its own that ran no autograd function: another forward pass.
    assert_assigned(trace, launches | {215: (9, 1, FWD)})


def test_recompute_is_a_part_of_bwd(trace: Timeline) -> None:
    trace.backward(100, 400)
    trace.function("aten::mm", 120, 160, thread=2)
    for number, at in enumerate((20, 130, 140, 300), start=1):
        trace.work("nvjet_k", at, 1000 * number, 1000 * number + 10, thread=1 if at == 20 else 2)
    # Autograd's thread is not done yet.
    trace.work("copy", 450, 5000, 5010, thread=2)
    expected = [(0, "fwd", 1, 10.0), (0, "bwd", 3, 3010.0), (0, "recompute", 2, 1010.0), (0, "all", 4, 4010.0)]
    assert rows_of(trace) == expected


def graphs(trace: Timeline, launched: str, call: str = "cudaGraphLaunch") -> None:
    """Graphs one after the other, each with a GEMM and an all-gather of its letter."""
    for correlation, name in enumerate(launched, start=1):
        trace.launch(100 * correlation, correlation, name=call)
        start = 10_000 + 100 * correlation
        trace.on_device(f"nvjet_{name}", start, start + 50, correlation, stream=7)
        trace.on_device(f"ncclDevKernel_{name}", start + 10, start + 70, correlation, stream=8)


@pytest.mark.parametrize(
    ("launched", "rows"),
    [
        # A graph of whole steps: iterations, but no passes.
        ("aaa", [(0, "all", 1, 70.0), (1, "all", 1, 70.0), (2, "all", 1, 70.0)]),
        # Graphs that take turns make up one iteration.
        ("ababa", [(0, "all", 2, 170.0), (1, "all", 2, 170.0), (2, "all", 1, 70.0)]),
        # Graphs that never repeat are one.
        ("abc", [(0, "all", 3, 270.0)]),
        # The same graph twice in an iteration.
        ("aabaab", [(0, "all", 3, 270.0), (1, "all", 3, 270.0)]),
        ("a", [(0, "all", 1, 70.0)]),
    ],
)
@pytest.mark.parametrize("call", ["cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch"])
def test_iterations_of_graphs_begin_where_they_repeat(
    trace: Timeline, call: str, launched: str, rows: list[tuple[int, str, int, float]]
) -> None:
    graphs(trace, launched, call)
    assert rows_of(trace) == rows


def test_graphs_within_the_profilers_steps(trace: Timeline) -> None:
    trace.step(4, 90, 290)
    trace.step(5, 290, 500)
    graphs(trace, "aaab")
    assert rows_of(trace) == [(4, "all", 2, 170.0), (5, "all", 2, 170.0)]


def test_what_is_launched_beside_a_graph_is_in_its_iteration(trace: Timeline) -> None:
    graphs(trace, "ss")
    for at in (50, 150, 250):
        trace.work(f"eager{at}", at, 20_000 + at)
    found = assigned(trace)
    # Midway between two launches: what is asked for there most often prepares the next.
    assert [found[f"eager{at}"] for at in (50, 150, 250)] == [(0, NEITHER), (1, NEITHER), (1, NEITHER)]
    assert {found["nvjet_s"][1], found["ncclDevKernel_s"][1]} == {NEITHER}


def test_what_is_copied_before_a_graph_is_launched_is_in_its_iteration(trace: Timeline) -> None:
    for i in range(3):
        start = 1000 * i
        trace.launch(start, 10 + i)
        trace.on_device("Memcpy HtoD (Pinned -> Device)", start + 2, start + 4, 10 + i, cat="gpu_memcpy")
        trace.launch(start + 5, 20 + i, name="cudaGraphLaunch")
        trace.on_device("nvjet_step", start + 6, start + 22, 20 + i)
    assert rows_of(trace) == [(0, "all", 1, 20.0), (1, "all", 1, 20.0), (2, "all", 1, 20.0)]


def test_graphs_of_single_passes_keep_them(trace: Timeline) -> None:
    graphs(trace, "fbfb")
    trace.backward(190, 250, thread=1)
    trace.backward(390, 450, thread=1)
    assert [(iteration, phase) for iteration, phase, *_ in rows_of(trace)] == [
        (iteration, phase) for iteration in (0, 1) for phase in ("fwd", "bwd", "all")
    ]


def test_a_long_sequence_of_graphs_ends_in_time() -> None:
    sequence = [(number % 3 == 0, 1) for number in range(30_000)]
    assert smallest_period(sequence) == 3
    assert smallest_period([*sequence, (7, 7)]) == len(sequence) + 1
    assert smallest_period([(1,)] * 30_000 + [(2,)]) == 30_001


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=12))
def test_the_period_of_a_sequence(letters: list[str]) -> None:
    sequence = [(ord(letter),) for letter in letters]
    shifts = (n for n in range(1, len(sequence) + 1) if sequence[n:] == sequence[: len(sequence) - n])
    assert smallest_period(sequence) == next(shifts)


def test_what_follows_the_backward_pass_without_a_number_is_no_forward(trace: Timeline) -> None:
    for step in (0, 1):
        start = 1000 * step
        trace.function("aten::mm", start + 10, start + 20)
        trace.work(f"nvjet_fwd{step}", start + 12)
        trace.backward(start + 100, start + 200, thread=2)
        trace.work(f"nvjet_bwd{step}", start + 150, thread=2)
        # Autograd's thread copies buckets back; the main thread runs Muon, then reduces what is left.
        trace.work(f"copy{step}", start + 210, thread=2)
        trace.work(f"nvjet_muon{step}", start + 220)
        trace.function("c10d::allreduce_", start + 230, start + 240)
        trace.work(f"ncclDevKernel{step}", start + 232)
    expected = {"nvjet_fwd": FWD, "nvjet_bwd": BWD, "copy": BWD, "nvjet_muon": NEITHER, "ncclDevKernel": NEITHER}
    assert assigned(trace) == {f"{name}{step}": (step, pass_) for step in (0, 1) for name, pass_ in expected.items()}


def test_without_a_backward_pass_what_has_no_number_is_forward_too(trace: Timeline) -> None:
    trace.function("aten::mm", 10, 20)
    assert_assigned(trace, {12: (1, 0, FWD), 30: (1, 0, FWD)})


def test_a_graph_is_forward_only_inside_an_operator_with_a_number(trace: Timeline) -> None:
    trace.function("aten::mm", 10, 20)
    trace.backward(100, 200)
    trace.work("nvjet_bwd", 150, thread=2)
    for correlation, (name, at) in enumerate({"numbered": 12, "of itself": 50}.items()):
        trace.launch(at, correlation, name="cudaGraphLaunch")
        trace.on_device(name, 1000 + at, 1005 + at, correlation)
    assert assigned(trace) == {"numbered": (0, FWD), "of itself": (0, NEITHER), "nvjet_bwd": (0, BWD)}


def test_a_copy_on_another_thread_beside_the_backward_pass_starts_no_iteration(trace: Timeline) -> None:
    trace.backward(100, 200, thread=2)
    for at, thread in ((10, 1), (110, 2), (150, 2)):
        trace.work(f"nvjet_{at}", at, thread=thread)
    trace.work("Memcpy HtoD", 120, thread=3, stream=9)
    assert {iteration for iteration, _ in assigned(trace).values()} == {0}


def test_an_iteration_starts_at_the_longest_pause_before_its_first_operator(trace: Timeline) -> None:
    """The loss is read after one backward pass, the batch copied before the next forward pass."""
    for step in (0, 1):
        start = 1000 * step
        trace.work(f"batch{step}", start)
        trace.function("aten::mm", start + 10, start + 20)
        trace.work(f"nvjet_fwd{step}", start + 12)
        trace.backward(start + 100, start + 200)
        trace.work(f"nvjet_bwd{step}", start + 150, thread=2)
        trace.work(f"loss{step}", start + 210)
    assert {name: iteration for name, (iteration, _) in assigned(trace).items()} == {
        f"{name}{step}": step for step in (0, 1) for name in ("batch", "nvjet_fwd", "nvjet_bwd", "loss")
    }
