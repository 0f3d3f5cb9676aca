"""The interpreter keeps running while the twin works, and its signals are handled."""

import os
import signal
import threading
import time

import homenode
import pytest

# Some seconds of work, too long for a test to wait for its end.
LONG = homenode.Scenario("tavo-mixed").replace(duration="100000s")
for name in LONG.vm_names:
    LONG = LONG.change_vm(name, work_share=100000)


def counted(work) -> tuple[int, float]:
    """How far another thread counts meanwhile, and the time it took."""
    count, is_over = 0, threading.Event()

    def others():
        nonlocal count
        while not is_over.is_set():
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=others)
    thread.start()
    began = time.monotonic()
    try:
        work()
    finally:
        took = time.monotonic() - began
        is_over.set()
        thread.join()
    return count, took


def test_other_threads_go_on():
    scenario = homenode.Scenario("tavo-mixed").replace(duration="60s")
    count, took = counted(lambda: homenode.simulate(scenario, "default", epoch="200us"))
    # A thread that sleeps a millisecond at a time counts some hundreds a second even on a busy machine; with the lock held, none.
    assert took > 0.2 and count > 50 * took, (count, took)


@pytest.fixture
def sigint():
    """Sets how SIGINT is handled. Python leaves it ignored if it was so at the start, as in a shell's background job."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "work",
    [
        lambda: homenode.simulate(LONG, "default"),
        lambda: homenode.whatif(LONG, at="90000s"),
        lambda: homenode.search(LONG.replace(duration="300s"), evaluations=10_000, jobs=1),
        lambda: homenode.reproduce("TAVO", jobs=1),
    ],
    ids=["simulate", "whatif", "search", "reproduce"],
)
def test_ctrl_c_ends_long_work(work, sigint):
    sigint(signal.default_int_handler)
    began = time.monotonic()
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    timer.join()
    assert time.monotonic() - began < 15


def test_sigint_that_is_ignored_stays_ignored(sigint):
    sigint(signal.SIG_IGN)
    timer = threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    homenode.simulate("churn", "homenode")
    timer.join()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_two_threads_simulate_at_once():
    alone = homenode.simulate("churn", "homenode")
    results = {}

    def run(name):
        results[name] = [homenode.simulate("churn", "homenode", seed=1).vms for _ in range(3)]

    threads = [threading.Thread(target=run, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(table == alone.vms for tables in results.values() for table in tables) and len(results) == 2
