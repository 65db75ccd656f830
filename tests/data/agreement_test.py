"""Workers agree on steps: with any speeds, lengths and errors, all run the same steps and none hangs."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.helpers.processes import run

# The steps need Keras's trees, but no particular backend.
BACKEND = "torch"
CASES = 40


class Post:
    """Carries the messages between workers that are threads."""

    def __init__(self, number):
        self.number = number
        self.turns = {}
        self.changed = threading.Condition()

    def send(self, turn, index, data):
        with self.changed:
            self.turns.setdefault(turn, {})[index] = data
            self.changed.notify_all()

    def receive(self, turn):
        with self.changed:
            complete = self.changed.wait_for(lambda: len(self.turns.get(turn, ())) == self.number, timeout=50)
            assert complete, f"Only workers {sorted(self.turns[turn])} came to message {turn}."
            return [self.turns[turn][i] for i in range(self.number)]


class Runtime:
    """The parts of a runtime that the steps use."""

    needs_equal_shapes = False
    devices = ("cpu:0",)

    def __init__(self, post, index):
        self.post = post
        self.group = self
        self.worker_index = index
        self.num_workers = self.num_replicas = post.number
        self.sent = 0

    def begin_gather_bytes(self, data):
        turn, self.sent = self.sent, self.sent + 1
        self.post.send(turn, self.worker_index, data)
        return lambda: self.post.receive(turn)

    def place(self, parts):
        return list(parts)


def work(runtime, read, step_seconds, buffer, results):
    from kdist.data.agreement import open_steps
    from kdist.data.input_options import InputOptions

    options = InputOptions(experimental_per_replica_buffer_size=buffer)
    steps = open_steps(runtime, read(), options, is_global=False)
    seen, error = [], None
    try:
        for step in steps:
            seen.append((step.counts, None if step.batch is None else int(step.batch.parts[0][0])))
            time.sleep(step_seconds)
    except ValueError as raised:
        error = str(raised)
    steps.close()
    results[runtime.worker_index] = seen, error, runtime.sent


def work_together(reads, step_seconds, buffer):
    post, results = Post(len(reads)), {}
    workers = [
        threading.Thread(target=work, args=(Runtime(post, i), read, step_seconds, buffer, results))
        for i, read in enumerate(reads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(results) == len(reads)
    return [results[i] for i in range(len(reads))]


def reading(length, seconds, fails_at):
    import numpy as np

    from kdist.data.reading import WorkerBatch

    def read():
        for number in range(length):
            if number == fails_at:
                raise OSError("disk gone")
            time.sleep(seconds)
            yield WorkerBatch([1], parts=[np.full(1, number)])

    return read


def in_worker_agree():
    draw = random.Random(0)
    for _ in range(CASES):
        number = draw.choice([2, 3])
        lengths = [draw.choice([5, 12]) for _ in range(number)]
        failing = [draw.choice([None, None, None, 3]) for _ in range(number)]
        reads = [reading(n, draw.choice([0, 0, 0.002]), f) for n, f in zip(lengths, failing, strict=True)]
        results = work_together(reads, draw.choice([0, 0, 0.002]), draw.choice([0, 1, 3]))
        fails = any(f is not None for f in failing)
        last = 3 if fails else max(lengths)
        for (seen, error, _), length in zip(results, lengths, strict=True):
            expected = [([int(s < n) for n in lengths], s if s < length else None) for s in range(last)]
            assert seen == expected
            assert (error is not None) == fails
            assert not fails or f"worker {failing.index(3)} failed in step 4: OSError: disk gone" in error
    return True


@pytest.mark.kills("data_error_told_late", "data_last_steps_dropped")
def test_all_workers_run_the_same_steps():
    assert run(BACKEND, 1, in_worker_agree)[0]


class Ready:
    """A pipeline that has always read enough, unlike a thread, which may be late."""

    def __init__(self, length):
        import numpy as np

        from kdist.data.reading import WorkerBatch

        self.left = [WorkerBatch([1], parts=[np.full(1, number)]) for number in range(length)]

    def take(self, most, wait=None):
        from kdist.data.prefetch import End

        taken = self.left[:most]
        del self.left[:most]
        return taken if len(taken) == most else [*taken, End()]

    def close(self):
        pass


def in_worker_count_messages():
    from kdist.data.agreement import Steps

    post, results = Post(2), {}

    def work(index):
        runtime = Runtime(post, index)
        steps = Steps(runtime, Ready(24), is_global=False)
        results[index] = [int(step.batch.parts[0][0]) for step in steps], runtime.sent

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[index] for index in range(2)]


def test_a_message_speaks_for_several_steps():
    for rows, messages in run(BACKEND, 1, in_worker_count_messages)[0]:
        assert rows == list(range(24))
        assert 24 / 3 <= messages <= 24 / 2
