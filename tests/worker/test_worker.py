"""Promises of one worker: results, deadlines, cancellation, crashes, limits. Real processes, real ONNX Runtime."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from edgeinfer import oip
from edgeinfer.artifact.manifest import Classes, Decode, StateSpec, TensorSpec
from edgeinfer.clock import NS_PER_MS
from edgeinfer.request import Expired, Failure, Payload, Reason, Refusal
from edgeinfer.worker.slot import SlotState
from edgeinfer.worker.spec import WorkerLimits
from edgeinfer.worker.worker import CRASHED, WORKER_LOST, EndCause, RunResult, Worker
from tests.worker import graphs
from tests.worker.conftest import StartWorker, floats, in_ms, output, request_of

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

FOREVER = request_of(n=np.array([1 << 50], np.int64), x=floats(0))
TEN_STEPS = request_of(n=np.array([10], np.int64), x=floats(1))


def matmul(size: int) -> Payload:
    return request_of(v=floats(0.5), shape=np.array([size, size], np.int64))


async def acknowledged(worker: Worker) -> None:
    """Wait until the process has given back all that it was sent."""
    async with asyncio.timeout(5):
        while worker.in_flight:
            await asyncio.sleep(0.002)


async def test_answers_with_the_models_numbers_and_each_phase_in_order(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.linear(size=8, seed=3))
    x = np.random.default_rng(1).standard_normal((1, 8)).astype(np.float32)
    before_ns = time.monotonic_ns()
    result = await worker.run(request_of(x=x), deadline_ns=in_ms(1000))
    assert isinstance(result, RunResult)
    marks = result.marks
    phases = [
        before_ns,
        marks.received_ns,
        marks.decoded_ns,
        marks.started_ns,
        marks.finished_ns,
        marks.postprocessed_ns,
    ]
    assert phases == sorted(phases)
    assert marks.postprocessed_ns < time.monotonic_ns()
    weights = np.frombuffer(graphs.linear(size=8, seed=3).graph.initializer[0].raw_data, np.float32).reshape(8, 8)
    np.testing.assert_allclose(output(result), x @ weights, atol=1e-5)


async def test_result_memory_is_shared_leased_and_unreadable_after_release(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity())
    result = await worker.run(request_of(x=floats(1, 2, 3)), deadline_ns=in_ms(1000))
    assert isinstance(result, RunResult)
    view = result.payload.tensors[0]
    assert isinstance(view, memoryview)
    assert list(worker.slot_states.values()) == [SlotState.RESULT]
    other = await worker.run(request_of(x=floats(7, 8, 9)), deadline_ns=in_ms(1000))
    assert bytes(view) == floats(1, 2, 3).tobytes()  # the next run did not touch it
    result.release()
    result.release()
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    assert output(other).tolist() == [7, 8, 9]
    assert set(worker.slot_states.values()) == {SlotState.FREE}


async def test_cancel_stops_a_loop_and_the_next_run_succeeds_in_the_same_process(start_worker: StartWorker) -> None:
    limits = WorkerLimits(cancel_grace_ns=1500 * NS_PER_MS)  # whether it stops, not how soon, on whatever machine
    worker = await start_worker(graphs.slow_loop(), limits=limits)
    task = asyncio.create_task(worker.run(FOREVER, deadline_ns=in_ms(60_000)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert output(await worker.run(TEN_STEPS, deadline_ns=in_ms(2000))).tolist() == [11]
    assert worker.is_alive


async def test_caller_is_told_at_the_deadline_and_the_slot_returns_only_when_the_worker_gave_it_back(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(graphs.slow_loop())
    deadline_ns = in_ms(80)
    ending = await worker.run(FOREVER, deadline_ns=deadline_ns)
    late_ns = time.monotonic_ns() - deadline_ns
    assert isinstance(ending, Expired)
    assert 0 <= late_ns < 50 * NS_PER_MS  # 1 ms on an idle machine
    assert list(worker.slot_states.values()) == [SlotState.IN_WORKER]
    await acknowledged(worker)
    assert list(worker.slot_states.values()) == [SlotState.FREE]
    assert worker.is_alive


@pytest.mark.slow
async def test_operator_that_does_not_listen_costs_the_process_its_life_after_the_grace(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(graphs.one_long_matmul(), limits=WorkerLimits(cancel_grace_ns=50 * NS_PER_MS))
    deadline_ns = in_ms(500)  # by then its matrix is filled and the multiplication, of seconds, is under way
    ending = await worker.run(matmul(6000), deadline_ns=deadline_ns)
    assert isinstance(ending, Expired)
    assert time.monotonic_ns() - deadline_ns < 50 * NS_PER_MS
    end = await asyncio.wait_for(asyncio.shield(worker.died), 5)
    assert (end.cause, end.status.signal_name) == (EndCause.OVERDUE, "SIGKILL")
    assert "50 ms" in end.detail
    again = await start_worker(graphs.one_long_matmul())
    assert output(await again.run(matmul(8), deadline_ns=in_ms(2000))).tolist() == [[2.0]]


async def test_late_result_is_dropped_and_never_answers_another_request(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.one_long_matmul(), limits=WorkerLimits(cancel_grace_ns=5000 * NS_PER_MS))
    ending = await worker.run(matmul(1500), deadline_ns=in_ms(20))
    assert isinstance(ending, Expired)
    assert output(await worker.run(matmul(4), deadline_ns=in_ms(4000))).tolist() == [[1.0]]
    assert worker.is_alive


async def test_one_run_waits_inside_and_more_wait_their_turn_in_order(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.slow_loop())
    order: list[int] = []

    async def run(number: int) -> None:
        steps = request_of(n=np.array([2000], np.int64), x=floats(number))
        assert output(await worker.run(steps, deadline_ns=in_ms(5000))).tolist() == [number + 2000]
        order.append(number)

    tasks = [asyncio.create_task(run(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert worker.in_flight == 2
    assert not worker.can_accept
    await asyncio.gather(*tasks)
    assert order == list(range(6))
    assert len(worker.slot_states) <= worker.limits.max_slots


async def test_waiting_run_that_expires_does_not_kill_the_one_under_way(start_worker: StartWorker) -> None:
    limits = WorkerLimits(cancel_grace_ns=20 * NS_PER_MS)
    worker = await start_worker(graphs.one_long_matmul(), limits=limits)
    long = asyncio.create_task(worker.run(matmul(2000), deadline_ns=in_ms(10_000)))
    await asyncio.sleep(0.01)
    assert isinstance(await worker.run(matmul(4), deadline_ns=in_ms(30)), Expired)
    assert output(await long).tolist() == [[500.0]]
    assert worker.is_alive


async def test_more_callers_than_may_wait_are_refused_at_once(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.slow_loop(), limits=WorkerLimits(max_waiting=1))
    tasks = [asyncio.create_task(worker.run(FOREVER, deadline_ns=in_ms(300))) for _ in range(4)]
    endings = await asyncio.gather(*tasks)
    refused = [ending for ending in endings if isinstance(ending, Refusal)]
    assert [refusal.reason for refusal in refused] == [Reason.QUEUE_FULL]
    assert sum(isinstance(ending, Expired) for ending in endings) == 3


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGKILL])
async def test_process_that_dies_in_a_run_is_a_failure_with_the_signals_name(
    start_worker: StartWorker, number: signal.Signals
) -> None:
    worker = await start_worker(graphs.slow_loop())
    under_way = asyncio.create_task(worker.run(FOREVER, deadline_ns=in_ms(10_000)))
    waiting = asyncio.create_task(worker.run(TEN_STEPS, deadline_ns=in_ms(10_000)))
    outside = asyncio.create_task(worker.run(TEN_STEPS, deadline_ns=in_ms(10_000)))
    await asyncio.sleep(0.03)
    os.kill(worker.pid, number)
    ending = await asyncio.wait_for(under_way, 1)
    assert isinstance(ending, Failure)
    assert ending.reason == CRASHED
    assert number.name in ending.detail
    for task in (waiting, outside):  # they had not begun: somebody may try them again
        lost = await asyncio.wait_for(task, 1)
        assert isinstance(lost, Failure)
        assert lost.reason == WORKER_LOST
    end = await worker.died
    assert (end.cause, end.status.signal) == (EndCause.CRASHED, number)
    assert worker.slot_bytes == 0
    late = await worker.run(TEN_STEPS, deadline_ns=in_ms(100))
    assert isinstance(late, Failure)
    assert late.reason == WORKER_LOST


async def test_answer_outlives_its_worker_until_it_is_released(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity())
    result = await worker.run(request_of(x=floats(4, 2)), deadline_ns=in_ms(1000))
    worker.kill("no longer needed")
    await worker.died
    assert output(result).tolist() == [4, 2]
    assert worker.slot_bytes == 0


async def test_stop_lets_the_runs_that_it_has_finish(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.slow_loop())
    runs = [asyncio.create_task(worker.run(TEN_STEPS, deadline_ns=in_ms(5000))) for _ in range(2)]
    await asyncio.sleep(0)
    end = await worker.stop()
    assert (end.cause, end.status.code) == (EndCause.STOPPED, 0)
    assert [output(await run).tolist() for run in runs] == [[11], [11]]


async def test_stop_does_not_wait_longer_than_its_grace(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.slow_loop())
    run = asyncio.create_task(worker.run(FOREVER, deadline_ns=in_ms(60_000)))
    await asyncio.sleep(0.01)
    began = time.monotonic()
    end = await worker.stop(grace_ns=50 * NS_PER_MS)
    assert time.monotonic() - began < 0.5
    assert (end.cause, end.status.signal_name) == (EndCause.STOPPED, "SIGKILL")
    assert isinstance(await run, Failure)


async def test_a_worker_is_called_after_its_model(start_worker: StartWorker) -> None:
    for model, name in (("det", "ei:det"), ("person-detect-large", "ei:person-detec")):
        worker = await start_worker(graphs.identity(), model=model)
        assert Path(f"/proc/{worker.pid}/comm").read_text().strip() == name


async def test_run_beyond_the_activation_cap_fails_alone(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.filled(), arena_max_bytes=32 << 20)
    for _ in range(2):
        ending = await worker.run(request_of(shape=np.array([1 << 31], np.int64)), deadline_ns=in_ms(5000))
        assert isinstance(ending, Failure)
        assert ending.reason == "out_of_memory"
        assert ".cc" not in ending.detail
        assert "/onnxruntime_src" not in ending.detail
    small = await worker.run(request_of(shape=np.array([3], np.int64)), deadline_ns=in_ms(1000))
    assert output(small).tolist() == [0, 0, 0]


async def test_data_limit_is_a_second_fence_around_the_process(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.filled(), data_limit_bytes=128 << 20)
    ending = await worker.run(request_of(shape=np.array([1 << 29], np.int64)), deadline_ns=in_ms(5000))
    assert isinstance(ending, Failure)
    assert ending.reason == "out_of_memory"
    small = await worker.run(request_of(shape=np.array([3], np.int64)), deadline_ns=in_ms(1000))
    assert output(small).tolist() == [0, 0, 0]


async def test_answer_larger_than_its_slot_is_granted_more_room_once_and_charged(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.filled(), limits=WorkerLimits(response_bytes=4096))
    result = await worker.run(request_of(shape=np.array([1 << 20], np.int64)), deadline_ns=in_ms(5000))
    assert output(result).shape == (1 << 20,)
    assert worker.slot_bytes >= 4 << 20
    tight = await start_worker(graphs.filled(), limits=WorkerLimits(response_bytes=4096, max_slot_bytes=1 << 20))
    ending = await tight.run(request_of(shape=np.array([1 << 20], np.int64)), deadline_ns=in_ms(5000))
    assert isinstance(ending, Failure)
    assert ending.reason == "output_too_large"
    assert "4194" in ending.detail
    assert output(await tight.run(request_of(shape=np.array([2], np.int64)), deadline_ns=in_ms(1000))).size == 2


async def test_eight_megabyte_requests_two_hundred_times_with_a_second_each(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity(), limits=WorkerLimits(response_bytes=9 << 20))
    big = np.arange(2 << 20, dtype=np.float32)
    for number in range(200):
        big[0] = number
        result = await worker.run(request_of(x=big), deadline_ns=in_ms(1000))
        assert isinstance(result, RunResult), result
        assert bytes(result.payload.tensors[0][:4]) == floats(number).tobytes()
        result.release()


async def test_nan_in_or_out_is_refused_unless_the_manifest_means_it(start_worker: StartWorker) -> None:
    def contract(name: str, *, allowed: bool) -> list[TensorSpec]:
        return [TensorSpec(name, "FP32", [-1], [8], allow_non_finite=allowed)]

    strict = await start_worker(
        graphs.logarithm(), inputs=contract("x", allowed=False), outputs=contract("y", allowed=False)
    )
    ending = await strict.run(request_of(x=floats(-1, 1)), deadline_ns=in_ms(1000))
    assert isinstance(ending, Failure)
    assert (ending.reason, "'y' has 1 of 2" in ending.detail) == ("non_finite_output", True)
    refused = await strict.run(request_of(x=floats(1, np.nan)), deadline_ns=in_ms(1000))
    assert isinstance(refused, Refusal)
    assert (refused.reason, "'x'" in refused.detail) == (Reason.INPUT_INVALID, True)
    lenient = await start_worker(
        graphs.logarithm(), inputs=contract("x", allowed=True), outputs=contract("y", allowed=True)
    )
    np.testing.assert_array_equal(
        output(await lenient.run(request_of(x=floats(0, 1)), deadline_ns=in_ms(1000))), floats(-np.inf, 0)
    )


async def test_state_is_kept_per_stream_and_its_loss_is_reported(start_worker: StartWorker) -> None:
    worker = await start_worker(
        graphs.accumulator(),
        inputs=[TensorSpec("x", "FP32", [1])],
        outputs=[TensorSpec("y", "FP32", [1])],
        state=[StateSpec("total", "total_out", "FP32", [1])],
        max_streams=2,
    )

    async def add(stream: str | None, x: float, *, start: bool = False) -> tuple[float, bool]:
        result = await worker.run(request_of(x=floats(x)), deadline_ns=in_ms(1000), stream=stream, sequence_start=start)
        assert isinstance(result, RunResult), result
        reset = result.state_reset
        assert [tensor.name for tensor in oip.response_header(result.payload).outputs] == ["y"]
        return float(output(result)[0]), reset

    assert await add("a", 1, start=True) == (1, False)
    assert await add("a", 2) == (3, False)
    assert await add("b", 5, start=True) == (5, False)
    assert await add("a", 3) == (6, False)
    assert await add("a", 10, start=True) == (10, False)
    assert await add(None, 4) == (4, False)
    assert await add("c", 1, start=True) == (1, False)  # a third stream: the least recently used one, b, goes
    assert await add("b", 1) == (1, True)
    worker.forget_stream("b")
    assert await add("b", 1) == (1, True)


async def test_answers_carry_the_label_that_the_manifest_makes(start_worker: StartWorker) -> None:
    worker = await start_worker(
        graphs.identity(),
        inputs=[TensorSpec("x", "FP32", [1])],
        outputs=[TensorSpec("y", "FP32", [1])],
        classes=Classes("y", ["other", "support_request"], threshold=0.5),
    )
    for score, label in ((0.25, "other"), (0.5, "support_request")):
        result = await worker.run(request_of(x=floats(score)), deadline_ns=in_ms(1000))
        assert isinstance(result, RunResult)
        assert oip.response_header(result.payload).parameters == {"label": label, "score": score}
        result.release()


async def test_text_is_decoded_in_the_worker(start_worker: StartWorker) -> None:
    rule = Decode("words", pattern="[a-z]+", lowercase=True, max_items=8)
    worker = await start_worker(
        graphs.strings(),
        inputs=[TensorSpec("x", "BYTES", [-1], [8], decode=rule)],
        outputs=[TensorSpec("y", "BYTES", [-1], [8])],
    )
    payload = oip.encode_media("x", b"I was charged twice!", "text/plain")
    result = await worker.run(payload, deadline_ns=in_ms(1000))
    assert isinstance(result, RunResult)
    words = [bytes(item) for item in oip.bytes_elements(result.payload.tensors[0])]
    assert words == [b"i", b"was", b"charged", b"twice"]
    result.release()
    many = await worker.run(oip.encode_media("x", b"a " * 9, "text/plain"), deadline_ns=in_ms(1000))
    assert isinstance(many, Refusal)
    assert "'x' has more than 8 words" in many.detail


async def test_every_thread_stays_inside_the_mask_at_start_and_when_it_changes(start_worker: StartWorker) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    worker = await start_worker(graphs.linear(64), intra_threads=3, cpus=cpus[:1])

    def masks() -> set[frozenset[int]]:
        tasks = [task.name for task in Path(f"/proc/{worker.pid}/task").iterdir()]
        assert len(tasks) >= 4  # main, reader, two of ONNX Runtime's
        return {frozenset(os.sched_getaffinity(int(task))) for task in tasks}

    assert masks() == {frozenset(cpus[:1])}
    worker.set_affinity(cpus[-1:])
    assert masks() == {frozenset(cpus[-1:])}
    x = request_of(x=np.ones((1, 64), np.float32))
    assert output(await worker.run(x, deadline_ns=in_ms(1000))).shape == (1, 64)
    assert masks() == {frozenset(cpus[-1:])}


@pytest.mark.slow
async def test_threads_do_not_spin_between_the_runs_of_a_slow_loop(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.linear(256, layers=8), intra_threads=2)
    x = request_of(x=np.ones((1, 256), np.float32))
    clock = ~worker.pid << 3 | 2
    output(await worker.run(x, deadline_ns=in_ms(1000)))
    before_ns = time.clock_gettime_ns(clock)
    for _ in range(15):
        output(await worker.run(x, deadline_ns=in_ms(1000)))
        await asyncio.sleep(0.1)
    assert time.clock_gettime_ns(clock) - before_ns < 0.05 * 1500 * NS_PER_MS


@pytest.mark.slow
async def test_idle_model_costs_under_one_percent_of_a_core(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.linear(256, layers=2), intra_threads=2)
    x = request_of(x=np.ones((1, 256), np.float32))
    output(await worker.run(x, deadline_ns=in_ms(1000)))
    clock = ~worker.pid << 3 | 2
    await asyncio.sleep(0.2)
    before_ns = time.clock_gettime_ns(clock)
    await asyncio.sleep(1.0)
    assert time.clock_gettime_ns(clock) - before_ns < 10 * NS_PER_MS


async def test_a_cancelled_caller_never_leaks_a_slot(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity())
    for pause_us in range(0, 600, 7):  # somewhere in there the answer and the cancellation meet
        task = asyncio.create_task(worker.run(request_of(x=floats(1)), deadline_ns=in_ms(1000)))
        await asyncio.sleep(pause_us / 1e6)
        task.cancel()
        try:
            result = await task
        except asyncio.CancelledError:
            continue
        assert isinstance(result, RunResult)
        result.release()
    await acknowledged(worker)
    assert set(worker.slot_states.values()) == {SlotState.FREE}


async def test_worker_offers_itself_to_the_oom_killer_and_dumps_no_core(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity())
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) >= 500
    limits = Path(f"/proc/{worker.pid}/limits").read_text().splitlines()
    assert next(line for line in limits if line.startswith("Max core file size")).split()[4:6] == ["0", "0"]
