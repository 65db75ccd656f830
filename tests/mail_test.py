"""Messages through a key-value store: they keep their order, can start in advance, and never hang."""

from __future__ import annotations

import collections
import queue
import threading
import time

import pytest

from kdist.backends import mail
from kdist.backends.mail import Mail
from kdist.backends.store import Store
from kdist.errors import WorkerLostError, WorkerTimeoutError


class Service:
    """The store that all workers of a test share. Each worker is a thread."""

    def __init__(self):
        self.entries = {}
        self.changed = threading.Condition()
        self.lost = set()


class StoreOfService(Store):
    def __init__(self, service):
        self.service = service

    def set(self, key, data):
        with self.service.changed:
            assert key not in self.service.entries
            self.service.entries[key] = data
            self.service.changed.notify_all()

    def get(self, key, seconds=0.0):
        with self.service.changed:
            self.service.changed.wait_for(lambda: key in self.service.entries, seconds)
            return self.service.entries.get(key)

    def delete(self, key):
        with self.service.changed:
            del self.service.entries[key]


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(mail, "_GLANCE", 0.05)
    return Service()


def mail_of(service, index, number=2, timeout=None, kind=StoreOfService):
    def check(awaited):
        if awaited in service.lost:
            raise WorkerLostError(f"worker {awaited} is lost")

    def explain(error):
        return WorkerLostError("the store is gone") if isinstance(error, ConnectionError) else error

    return Mail(kind(service), [f"worker {i}" for i in range(number)], index, timeout, check, explain)


def together(functions):
    results = queue.SimpleQueue()
    threads = [
        threading.Thread(target=lambda i=i, f=f: results.put((i, f())), daemon=True)
        for i, f in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    found = dict(results.get_nowait() for _ in functions)
    return [found[i] for i in range(len(functions))]


@pytest.fixture(params=[2, 100], ids=["collected", "direct"])
def way(request, monkeypatch):
    """Whether three workers read the messages of each other, or the chief collects them."""
    monkeypatch.setattr(mail, "MOST_DIRECT", request.param)
    return request.node.callspec.id.split("-")[0]


def test_messages_of_one_turn_belong_together(service, way):
    def talk(index):
        box = mail_of(service, index, 3)
        heard = []
        for turn in range(20):
            text = f"{index} says {turn}".encode()
            heard.append(box.begin(text)() if (turn + index) % 3 else box.gather(text))
        return heard

    expected = [[f"{i} says {turn}".encode() for i in range(3)] for turn in range(20)]
    assert together([lambda i=i: talk(i) for i in range(3)]) == [expected] * 3
    left = 4 if way == "collected" else 3
    assert len(service.entries) == left, "Messages that all have read must not stay in the store."


def test_messages_that_are_too_long_to_collect(service, way, monkeypatch):
    monkeypatch.setattr(mail, "_MOST_COLLECTED", 5)
    said = [[b"", b"", b""], [b"", b"12345", b""], [b"1", b"2345", b"6"]]
    boxes = [mail_of(service, i, 3) for i in range(3)]
    for turn in said:
        assert together([lambda i=i, t=turn: boxes[i].gather(t[i]) for i in range(3)]) == [turn] * 3


@pytest.mark.kills("collected_messages_missing_without_a_word", "collected_messages_blame_the_chief")
@pytest.mark.parametrize("timeout", [None, 0.3])
def test_all_name_the_worker_that_is_missing(service, way, timeout):
    error = WorkerLostError if timeout is None else WorkerTimeoutError
    boxes = [mail_of(service, i, 3, timeout) for i in range(2)]
    if timeout is None:
        service.lost.add(2)

    def talk(box):
        with pytest.raises(error, match=r"worker 2 (is lost|did not respond within 0\.3 s)"):
            box.gather(b"hello?")

    together([lambda box=box: talk(box) for box in boxes])


@pytest.mark.kills("messages_of_many_workers_not_collected", "messages_of_many_workers_read_one_by_one")
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("number", [8, 9, 64])
def test_the_number_of_requests_per_worker(service, number, lists):
    asked = collections.Counter()

    class Counting(StoreOfService):
        def _count(self):
            asked[threading.get_ident()] += 1

        def set(self, key, data):
            self._count()
            super().set(key, data)

        def get(self, key, seconds=0.0):
            self._count()
            return super().get(key, 20.0)  # each request waits until it succeeds

        def get_all(self, folder):
            self._count()
            found = self.service.entries if lists else {}
            return {key: data for key, data in found.items() if key.startswith(f"{folder}/")}

    def talk(index):
        if not index:  # the chief comes last
            with service.changed:
                assert service.changed.wait_for(lambda: len(service.entries) == number - 1, 10)
        return mail_of(service, index, number, kind=Counting).gather(b"%d" % index)

    heard = together([lambda i=i: talk(i) for i in range(number)])
    assert heard == [[b"%d" % i for i in range(number)]] * number
    chief, *others = sorted(asked.values(), reverse=True)
    expected = (4, {2}) if lists else (2 + 2 * number, {2})
    assert (chief, {*others}) == ((number, {number}) if number <= 8 else expected)


def test_to_begin_does_not_wait(service):
    # The second worker sends its message only after `begin` has returned.
    first, second = mail_of(service, 0, timeout=20), mail_of(service, 1)
    received = first.begin(b"early")
    assert second.gather(b"late") == [b"early", b"late"]
    assert received() == [b"early", b"late"]


def test_a_message_that_was_begun_comes_before_the_next(service):
    first, second = mail_of(service, 0), mail_of(service, 1)

    def talk():
        received = first.begin(b"1")
        return first.gather(b"2"), received()

    def answer():
        with service.changed:  # the first worker must already wait for the answer to its message
            assert service.changed.wait_for(lambda: mail._key(0, 0) in service.entries, 10)
        return second.gather(b"a"), second.gather(b"b")

    assert together([talk, answer]) == [([b"2", b"b"], [b"1", b"a"]), ([b"1", b"a"], [b"2", b"b"])]


def test_a_lost_sender_is_named(service):
    received = mail_of(service, 0, timeout=5).begin(b"hello?")
    service.lost.add(1)
    with pytest.raises(WorkerLostError, match="worker 1 is lost"):
        received()


@pytest.mark.parametrize(("raised", "told"), [(ConnectionError, WorkerLostError), (KeyError, KeyError)])
def test_an_error_of_the_store_is_explained(service, raised, told):
    class Failing(StoreOfService):
        def set(self, key, data):
            raise raised("no store")

    with pytest.raises(told, match="store"):
        mail_of(service, 0, kind=Failing).gather(b"hello?")


def test_a_sender_that_does_not_answer_is_named(service):
    with pytest.raises(WorkerTimeoutError, match=r"worker 1 did not respond within 0\.1 s"):
        mail_of(service, 0, timeout=0.1).gather(b"hello?")


def test_a_store_that_does_not_answer_is_not_waited_for(service, monkeypatch):
    monkeypatch.setenv("KDIST_HEARTBEAT_TIMEOUT", "1")
    answers = threading.Event()

    class Silent(StoreOfService):
        def set(self, key, data):
            answers.wait(100)

    received = mail_of(service, 1, kind=Silent).begin(b"hello?")
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="worker 0: it no longer responds"):
        received()
    assert 0.9 < time.monotonic() - began < 50
    answers.set()


def test_the_thread_that_gathers_does_not_wait_for_itself(service):
    box = mail_of(service, 0, timeout=5)
    errors = queue.SimpleQueue()

    class Asking(StoreOfService):
        def set(self, key, data):
            try:
                received.get(timeout=5)()
            except RuntimeError as error:
                errors.put(error)
            super().set(key, data)

    box._store = Asking(service)
    received = queue.SimpleQueue()
    received.put(box.begin(b"1"))
    assert "this is the messenger thread" in str(errors.get(timeout=5))
    mail_of(service, 1).gather(b"2")
