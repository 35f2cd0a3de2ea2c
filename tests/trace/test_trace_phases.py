"""Which iteration and pass events are given, on traces made by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import analyse_trace
from overlap_sweep.trace.phases import BWD, FWD, NEITHER, NO_ITERATION, RECOMPUTE, _period


def assigned(trace: Any) -> dict[str, tuple[int, int]]:
    """Event name -> (iteration, pass)."""
    read = read_trace(trace.write())
    activity = activity_of(read)
    names = [read.labels[label][1] for label in activity.events.label]
    columns = zip(activity.assignment.iteration.tolist(), activity.assignment.pass_.tolist(), strict=True)
    return dict(zip(names, columns, strict=True))


def test_a_launch_inside_autograd_on_its_own_thread_is_backward(trace: Any) -> None:
    trace.backward(100, 200, thread=2)
    for correlation, (at, thread) in enumerate([(50, 1), (150, 2), (160, 1), (199, 2)], start=1):
        trace.launch(at, correlation, thread)
        trace.kernel(f"k{correlation}", 1000 + 10 * correlation, 1005 + 10 * correlation, correlation)
    passes = {name: pass_ for name, (_, pass_) in assigned(trace).items()}
    assert passes == {"k1": FWD, "k2": BWD, "k3": FWD, "k4": BWD}


def test_iterations_turn_from_backward_to_forward_in_launch_order(trace: Any) -> None:
    correlation = 0
    for start in (0, 1000, 2000):
        trace.backward(start + 500, start + 600)
        for at, thread in ((100, 1), (200, 1), (550, 2), (560, 2)):
            correlation += 1
            trace.launch(start + at, correlation, thread)
            # The GPU lags behind and runs streams in any order: only the launches tell.
            trace.kernel(f"k{start}-{at}", 9000 - correlation * 10, 9005 - correlation * 10, correlation)
    assert assigned(trace) == {
        f"k{start}-{at}": (iteration, pass_)
        for iteration, start in enumerate((0, 1000, 2000))
        for at, pass_ in ((100, FWD), (200, FWD), (550, BWD), (560, BWD))
    }


def test_a_trace_that_starts_in_a_backward_pass(trace: Any) -> None:
    trace.backward(0, 100)
    for correlation, (at, thread) in enumerate([(50, 2), (150, 1)], start=1):
        trace.launch(at, correlation, thread)
        trace.kernel(f"k{correlation}", at + 10, at + 20, correlation)
    assert assigned(trace) == {"k1": (0, BWD), "k2": (1, FWD)}


def test_profiler_steps_name_the_iterations(trace: Any) -> None:
    trace.annotation("ProfilerStep#7", 100, 200)
    trace.annotation("ProfilerStep#8", 200, 300)
    # Two micro-batches in one step do not make two iterations.
    for start, end in ((120, 130), (150, 160), (220, 230)):
        trace.backward(start, end)
    for at, thread in ((50, 1), (110, 1), (125, 2), (140, 1), (155, 2), (210, 1), (225, 2), (350, 1)):
        trace.launch(at, at, thread)
        trace.kernel(f"k{at}", at + 1000, at + 1005, correlation=at)
    assert assigned(trace) == {
        "k50": (NO_ITERATION, FWD),
        "k110": (7, FWD),
        "k125": (7, BWD),
        "k140": (7, FWD),
        "k155": (7, BWD),
        "k210": (8, FWD),
        "k225": (8, BWD),
        "k350": (NO_ITERATION, FWD),
    }
    assert [(row.iteration, row.phase) for row in analyse_trace(trace.path)] == [
        (iteration, phase) for iteration in (7, 8) for phase in ("fwd", "bwd", "all")
    ]


def test_kernels_of_a_cuda_graph_share_the_launch_of_the_graph(trace: Any) -> None:
    trace.backward(100, 200)
    trace.launch(50, 1, name="cudaGraphLaunch")
    trace.launch(150, 2, thread=2, name="cudaGraphLaunch")
    for graph in (1, 2):
        for node in range(3):
            start = 1000 * graph + 10 * node
            trace.kernel(f"graph{graph}-node{node}", start, start + 5, correlation=graph, stream=7 + node)
    found = assigned(trace)
    assert {found[f"graph1-node{node}"] for node in range(3)} == {(0, FWD)}
    assert {found[f"graph2-node{node}"] for node in range(3)} == {(0, BWD)}


def test_an_event_without_launch_follows_the_one_before_it_on_its_stream(trace: Any) -> None:
    trace.backward(100, 200)
    for correlation, (at, thread) in enumerate([(50, 1), (150, 2), (250, 1)], start=1):
        trace.launch(at, correlation, thread)
    trace.kernel("first of its stream", 1005, 1006, correlation=None, stream=8)
    trace.kernel("bwd elsewhere", 1020, 1030, correlation=2, stream=9)
    trace.kernel("fwd", 1000, 1010, correlation=1)
    trace.kernel("after fwd", 1040, 1050)
    trace.kernel("next fwd", 1100, 1110, correlation=3)
    trace.kernel("correlation of no launch", 1120, 1130, correlation=99)
    trace.kernel("before everything", 900, 910, stream=8)
    found = assigned(trace)
    assert found["after fwd"] == found["fwd"] == (0, FWD)
    assert found["correlation of no launch"] == found["next fwd"] == (1, FWD)
    assert found["first of its stream"] == (0, FWD)
    assert found["before everything"] == (0, FWD)
    assert found["bwd elsewhere"] == (0, BWD)


def test_without_any_launch_everything_is_one_forward_pass(trace: Any) -> None:
    trace.kernel("nvjet_x", 0, 10)
    trace.kernel("ncclDevKernel_AllGather", 20, 30, correlation=5)
    assert set(assigned(trace).values()) == {(0, FWD)}


def test_recomputation_inside_backward_counts_as_backward(trace: Any) -> None:
    trace.op("CheckpointFunction", 10, 90)
    trace.launch(20, 1)
    trace.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 300, thread=2)
    trace.op("aten::mm", 110, 150, thread=2)
    trace.launch(120, 2, thread=2)
    trace.backward(200, 290, thread=2)
    trace.launch(210, 3, thread=2)
    for correlation in (1, 2, 3):
        trace.kernel(f"nvjet_{correlation}", 1000 * correlation, 1000 * correlation + 10, correlation)
    assert assigned(trace) == {"nvjet_1": (0, FWD), "nvjet_2": (0, BWD), "nvjet_3": (0, BWD)}


def test_optimizer_and_barrier_are_in_neither_pass_and_start_no_iteration(trace: Any) -> None:
    trace.backward(100, 200)
    trace.annotation("Optimizer.step#AdamW.step", 300, 400)
    trace.annotation("Optimizer.zero_grad#AdamW.zero_grad", 400, 410)
    trace.op("c10d::barrier", 420, 430)
    for at, thread in ((50, 1), (150, 2), (350, 1), (405, 1), (425, 1), (500, 1)):
        trace.launch(at, at, thread)
        trace.kernel(f"k{at}", at + 1000, at + 1005, correlation=at)
    assert assigned(trace) == {
        "k50": (0, FWD),
        "k150": (0, BWD),
        "k350": (0, NEITHER),
        "k405": (0, NEITHER),
        "k425": (0, NEITHER),
        "k500": (1, FWD),
    }


def test_nothing_but_copies_after_the_last_pass_is_no_iteration(trace: Any) -> None:
    trace.backward(100, 200)
    for correlation, (at, thread) in enumerate([(50, 1), (150, 2), (250, 1)], start=1):
        trace.launch(at, correlation, thread)
    trace.kernel("nvjet_1", 1000, 1010, 1)
    trace.kernel("nvjet_2", 1010, 1020, 2)
    trace.copy("Memcpy DtoH (Device -> Pageable)", 1030, 1040, 3)
    assert {row.iteration for row in analyse_trace(trace.write())} == {0}


def test_annotations_of_the_gpu_are_no_activity(trace: Any) -> None:
    trace.launch(0, 1)
    trace.kernel("ncclDevKernel_AllGather_RING_LL", 10, 20, 1)
    trace.add("gpu_user_annotation", "nccl:_all_gather_base", 10, 90, 0, 7, correlation=1)
    (row, _) = analyse_trace(trace.write())
    assert (row.num_comm_events, row.span_us) == (1, 10.0)


def test_cpu_spans_of_other_threads_are_in_the_pass_that_autograd_is_in(trace: Any) -> None:
    for start in (0, 1000):
        trace.op("c10d::_allgather_base_", start + 10, start + 12)
        trace.annotation(f"gloo:all_gather{start}", start + 15, start + 40, thread=5)
        trace.op(f"aten::mm{start}", start + 50, start + 90)
        # In the gap between two backward functions it is still backward: nothing runs forward.
        trace.backward(start + 100, start + 150, thread=1)
        trace.annotation(f"gloo:all_reduce{start}", start + 140, start + 300, thread=5)
        trace.backward(start + 200, start + 220, thread=1)
        trace.annotation(f"gloo:send{start}", start + 230, start + 240, thread=6)
    found = assigned(trace)
    for iteration, start in enumerate((0, 1000)):
        assert found[f"gloo:all_gather{start}"] == (iteration, FWD)
        assert found[f"gloo:all_reduce{start}"] == (iteration, BWD)
        assert found[f"gloo:send{start}"] == (iteration, BWD)


def test_cpu_trace_without_autograd_is_forward(trace: Any) -> None:
    trace.annotation("ProfilerStep#3", 0, 100)
    trace.op("aten::mm", 10, 20)
    trace.annotation("gloo:all_gather", 15, 30, thread=5)
    assert assigned(trace) == {"aten::mm": (3, FWD), "gloo:all_gather": (3, FWD)}


def forward_op(trace: Any, name: str, start: float, end: float, thread: int) -> None:
    """An operator as autograd notes those of a forward computation."""
    trace.add("cpu_op", name, start, end, 100, thread, **{"Sequence number": 7, "Fwd thread id": 0})


def test_what_checkpoints_run_again_is_told_apart(trace: Any) -> None:
    forward_op(trace, "aten::mm", 10, 30, thread=1)
    trace.launch(20, 1)
    trace.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 100, 400, 100, 2)
    # The operator of the backward pass itself notes the thread that ran forward.
    trace.add("cpu_op", "MmBackward0", 110, 390, 100, 2, **{"Sequence number": 7, "Fwd thread id": 1})
    trace.launch(115, 2, thread=2)
    forward_op(trace, "aten::mm", 120, 160, thread=2)
    trace.launch(130, 3, thread=2)
    trace.op("aten::view", 170, 190, thread=2)
    trace.launch(180, 4, thread=2)
    forward_op(trace, "aten::mm", 200, 230, thread=9)
    trace.launch(210, 5, thread=2)
    trace.launch(215, 6, thread=9)
    for correlation in range(1, 7):
        trace.kernel(f"nvjet_{correlation}", 1000 * correlation, 1000 * correlation + 10, correlation)
    assert assigned(trace) == {
        "nvjet_1": (0, FWD),
        "nvjet_2": (0, BWD),
        "nvjet_3": (0, RECOMPUTE),
        "nvjet_4": (0, BWD),
        "nvjet_5": (0, BWD),
        # On a thread of its own that ran no autograd function: another forward pass.
        "nvjet_6": (1, FWD),
    }


def test_recompute_is_a_part_of_bwd(trace: Any) -> None:
    trace.launch(20, 1)
    trace.backward(100, 400)
    forward_op(trace, "aten::mm", 120, 160, thread=2)
    for correlation, at in ((2, 130), (3, 140), (4, 300)):
        trace.launch(at, correlation, thread=2)
    for correlation in range(1, 5):
        trace.kernel(f"nvjet_{correlation}", 1000 * correlation, 1000 * correlation + 10, correlation)
    rows = {row.phase: (row.num_gemm_events, row.span_us) for row in analyse_trace(trace.write())}
    assert rows == {"fwd": (1, 10.0), "bwd": (3, 2010.0), "recompute": (2, 1010.0), "all": (4, 3010.0)}


def graphs(trace: Any, *launched: str) -> None:
    """Graphs one after the other, each with a GEMM and an all-gather of its name."""
    for correlation, name in enumerate(launched, start=1):
        trace.launch(100 * correlation, correlation, name="cudaGraphLaunch")
        start = 10_000 + 100 * correlation
        trace.kernel(f"nvjet_{name}", start, start + 50, correlation, stream=7)
        trace.kernel(f"ncclDevKernel_{name}", start + 10, start + 70, correlation, stream=8)


def rows_of(trace: Any) -> list[tuple[int, str, int, float]]:
    rows = analyse_trace(trace.write())
    return [(row.iteration, row.phase, row.num_gemm_events, row.span_us) for row in rows]


def test_a_graph_of_whole_steps_has_iterations_but_no_passes(trace: Any) -> None:
    graphs(trace, "step", "step", "step")
    assert rows_of(trace) == [(iteration, "all", 1, 70.0) for iteration in range(3)]


def test_graphs_that_take_turns_make_up_one_iteration(trace: Any) -> None:
    graphs(trace, "a", "b", "a", "b", "a")
    assert rows_of(trace) == [(0, "all", 2, 170.0), (1, "all", 2, 170.0), (2, "all", 1, 70.0)]


def test_graphs_that_never_repeat_are_one_iteration(trace: Any) -> None:
    graphs(trace, "a", "b", "c")
    assert rows_of(trace) == [(0, "all", 3, 270.0)]


def test_the_same_graph_twice_in_an_iteration(trace: Any) -> None:
    graphs(trace, "a", "a", "b", "a", "a", "b")
    assert rows_of(trace) == [(0, "all", 3, 270.0), (1, "all", 3, 270.0)]


def test_a_single_launch_of_a_graph(trace: Any) -> None:
    graphs(trace, "step")
    assert rows_of(trace) == [(0, "all", 1, 70.0)]


def test_graphs_within_the_profilers_steps(trace: Any) -> None:
    trace.annotation("ProfilerStep#4", 90, 290)
    trace.annotation("ProfilerStep#5", 290, 500)
    graphs(trace, "a", "a", "a", "b")
    assert rows_of(trace) == [(4, "all", 2, 170.0), (5, "all", 2, 170.0)]


def test_what_is_launched_beside_a_graph_is_in_its_iteration(trace: Any) -> None:
    graphs(trace, "step", "step")
    for correlation, at in ((11, 50), (12, 150), (13, 250)):
        trace.launch(at, correlation)
        trace.kernel(f"eager{at}", 20_000 + at, 20_010 + at, correlation)
    found = assigned(trace)
    # Midway between two launches: what is asked for there most often prepares the next.
    assert [found[f"eager{at}"] for at in (50, 150, 250)] == [(0, NEITHER), (1, NEITHER), (1, NEITHER)]
    assert {found["nvjet_step"][1], found["ncclDevKernel_step"][1]} == {NEITHER}


def test_what_is_copied_before_a_graph_is_launched_is_in_its_iteration(trace: Any) -> None:
    for i in range(3):
        start = 1000 * i
        trace.launch(start, 10 + i)
        trace.copy("Memcpy HtoD (Pinned -> Device)", start + 2, start + 4, 10 + i)
        trace.launch(start + 5, 20 + i, name="cudaGraphLaunch")
        trace.kernel("nvjet_step", start + 6, start + 22, 20 + i)
    assert [(iteration, phase) for iteration, phase, *_ in rows_of(trace)] == [(0, "all"), (1, "all"), (2, "all")]
    assert {row.span_us for row in analyse_trace(trace.path)} == {20.0}


def test_graphs_of_single_passes_keep_them(trace: Any) -> None:
    graphs(trace, "fwd", "bwd", "fwd", "bwd")
    trace.backward(190, 250, thread=1)
    trace.backward(390, 450, thread=1)
    assert [(iteration, phase) for iteration, phase, *_ in rows_of(trace)] == [
        (iteration, phase) for iteration in (0, 1) for phase in ("fwd", "bwd", "all")
    ]


def test_a_long_sequence_of_graphs_ends_in_time() -> None:
    sequence = [(number % 3 == 0, 1) for number in range(30_000)]
    assert _period(sequence) == 3
    assert _period([*sequence, (7, 7)]) == len(sequence) + 1
    assert _period([(1,)] * 30_000 + [(2,)]) == 30_001


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=12))
def test_the_period_of_a_sequence(letters: list[str]) -> None:
    sequence = [(ord(letter),) for letter in letters]
    shifts = (n for n in range(1, len(sequence) + 1) if sequence[n:] == sequence[: len(sequence) - n])
    assert _period(sequence) == next(shifts)


def numbered(trace: Any, name: str, start: float, end: float, thread: int = 1) -> None:
    """An operator that autograd noted as part of a forward computation."""
    args = {"Sequence number": 1, "Fwd thread id": 0}
    trace.add("cpu_op", name, start, end, 100, thread, **args)


def launched(trace: Any, name: str, at: float, correlation: int, thread: int = 1) -> None:
    trace.launch(at, correlation, thread)
    trace.kernel(name, at + 5, at + 10, correlation)


def test_what_follows_the_backward_pass_without_a_number_is_no_forward(trace: Any) -> None:
    for step in (0, 1):
        start = 1000 * step
        numbered(trace, "aten::mm", start + 10, start + 20)
        launched(trace, f"nvjet_fwd{step}", start + 12, 10 * step + 1)
        trace.backward(start + 100, start + 200, thread=2)
        launched(trace, f"nvjet_bwd{step}", start + 150, 10 * step + 2, thread=2)
        # Autograd's thread copies buckets back; the main thread clips, then reduces what is left.
        launched(trace, f"copy{step}", start + 210, 10 * step + 3, thread=2)
        launched(trace, f"clip{step}", start + 220, 10 * step + 4)
        numbered(trace, "c10d::allreduce_", start + 230, start + 240)
        launched(trace, f"ncclDevKernel{step}", start + 232, 10 * step + 5)
    expected = {"nvjet_fwd": FWD, "nvjet_bwd": BWD, "copy": BWD, "clip": NEITHER, "ncclDevKernel": NEITHER}
    assert assigned(trace) == {f"{name}{step}": (step, pass_) for step in (0, 1) for name, pass_ in expected.items()}


def test_a_copy_on_another_thread_beside_the_backward_pass_starts_no_iteration(trace: Any) -> None:
    launched(trace, "nvjet_fwd", 10, 1)
    trace.backward(100, 200, thread=2)
    launched(trace, "nvjet_bwd", 110, 2, thread=2)
    trace.launch(120, 3, thread=3)
    trace.copy("Memcpy HtoD (Pinned -> Device)", 125, 130, 3, stream=9)
    launched(trace, "nvjet_bwd2", 150, 4, thread=2)
    assert {iteration for iteration, _ in assigned(trace).values()} == {0}


def test_an_iteration_starts_at_the_longest_pause_before_its_first_operator(trace: Any) -> None:
    """The loss is read after one backward pass, the batch copied before the next forward pass."""
    for step in (0, 1):
        start = 1000 * step
        launched(trace, f"batch{step}", start, 10 * step + 1)
        numbered(trace, "aten::mm", start + 10, start + 20)
        launched(trace, f"nvjet_fwd{step}", start + 12, 10 * step + 2)
        trace.backward(start + 100, start + 200)
        launched(trace, f"nvjet_bwd{step}", start + 150, 10 * step + 3, thread=2)
        launched(trace, f"loss{step}", start + 210, 10 * step + 4)
    assert {name: iteration for name, (iteration, _) in assigned(trace).items()} == {
        f"{name}{step}": step for step in (0, 1) for name in ("batch", "nvjet_fwd", "nvjet_bwd", "loss")
    }


def test_forward_and_backward_on_threads_of_their_own(trace: Any) -> None:
    numbered(trace, "aten::mm", 10, 20, thread=1)
    trace.backward(30, 60, thread=2)
    trace.op("aten::bmm", 35, 55, thread=2)
    trace.annotation("gloo:all_reduce", 40, 50, thread=9)
    assert assigned(trace) == {"aten::mm": (0, FWD), "aten::bmm": (0, BWD), "gloo:all_reduce": (0, BWD)}


def test_point_to_point_spans_on_the_calling_thread_hide_nothing(trace: Any) -> None:
    trace.annotation("gloo:send", 10, 110)
    trace.annotation("gloo:recv", 12, 112)
    trace.op("aten::mm", 20, 70)
    row = analyse_trace(trace.write())[-1]
    assert (row.gemm_busy_us, row.comm_busy_us, row.overlap_us, row.num_comm_events) == (50.0, 102.0, 50.0, 2)
