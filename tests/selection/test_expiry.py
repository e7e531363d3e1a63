"""What is made of weights expires after a step of an optimizer, whichever thread makes the one or the other."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import wirings
from wirings.selection import expiry, passes, shared


class Made:
    """Counts how often it has expired."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.times, self.then = 0, then

    def expire(self) -> None:
        self.times += 1
        expiry.expired(self)
        self.then()


def step() -> None:
    """A step of some optimizer, of other weights."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1).step()


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[], None], count: int = 6) -> list[Exception]:
    """Run the same work in several threads; returns what they raise."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_expires_once() -> None:
    one, other = Made(), Made()
    expiry.expires_after_step(one)
    expiry.expires_after_step(other)
    expiry.expired(other)
    step()
    step()
    assert (one.times, other.times) == (1, 0)


def test_what_is_made_during_a_step_expires_after_the_next() -> None:
    late = Made()
    first = Made(then=lambda: expiry.expires_after_step(late))
    expiry.expires_after_step(first)
    step()
    assert late.times == 0
    step()
    assert late.times == 1


@pytest.mark.usefixtures("switching")
def test_threads_make_and_expire_at_once() -> None:
    def work() -> None:
        kept = [Made() for _ in range(50)]
        for _ in range(100):
            for one in kept:
                expiry.expires_after_step(one)
            expiry._expire_all()

    assert in_threads(work) == []


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold"])
def test_threads_train_models_of_their_own(rule: str) -> None:
    def work() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        wirings.wire_(model, rule, density=0.4, share="global")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(20):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            assert sum(int((layer.weight != 0).sum()) for layer in model) == 19

    assert in_threads(work) == []


def test_ranking_that_another_thread_drops_is_still_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wiring = wirings.wire_(model, "soft_threshold", density=0.5, share="global")
    x = torch.ones(2, 4)
    expected = model(x)
    plain = shared.expires_after_step

    def then_step(one: Any) -> None:
        plain(one)
        step()

    monkeypatch.setattr(shared, "expires_after_step", then_step)
    assert torch.equal(model(x), expected)
    assert len(wiring.masks()) == 2


def test_step_of_another_thread_only_ends_that_weights_are_made_at_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(device)
    wirings.wire_(model, "dnw", density=0.4, share="global")
    x = torch.ones(2, 6, device=device)
    expected = model(x)
    made, plain = [], passes.kept_of
    monkeypatch.setattr(passes, "kept_of", lambda *args: made.append(1) or plain(*args))
    handle = model[1].register_forward_hook(lambda *_: step())
    assert torch.equal(model(x), expected)
    handle.remove()
    assert torch.equal(model(x), expected)
    assert len(made) == 2  # once a pass
