"""Sharing rows between threads: every row once, in order, and torch's own threads as they were."""

import threading

import pytest
import torch

from scalewright.numerics import threads
from scalewright.numerics.threads import in_row_shares


@pytest.fixture
def num_threads():
    """Sets the number of torch's threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _little_is_enough(monkeypatch):
    monkeypatch.setattr(threads, "_WORTH_A_THREAD", 8)


def made(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.arange(2.0 * rows * 8).reshape(2, rows, 8)
    return x, x.amin(dim=(0, -1)), x.amax(dim=(0, -1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_row_is_in_one_share_and_shares_come_in_order(number, rows, weighted, num_threads):
    num_threads(number)
    x, lo, hi = made(rows)
    weights = torch.arange(8.0) if weighted else None
    shares = in_row_shares(lambda *share: share, x, lo, hi, weights)
    assert len(shares) == min(number, rows)
    torch.testing.assert_close(torch.cat([share[0] for share in shares], dim=1), x)
    torch.testing.assert_close(torch.cat([share[1] for share in shares]), lo)
    torch.testing.assert_close(torch.cat([share[2] for share in shares]), hi)
    for share in shares:
        assert share[0].shape[1] == share[1].shape[0] == share[2].shape[0] > 0
        if weighted:
            torch.testing.assert_close(share[3].expand(share[0].shape), weights.expand(share[0].shape))
        else:
            assert share[3] is None


def test_weights_of_their_own_go_with_their_rows(num_threads):
    num_threads(2)
    x, lo, hi = made(6)
    weights = torch.rand(2, 6, 8)
    shares = in_row_shares(lambda *share: share, x, lo, hi, weights)
    torch.testing.assert_close(torch.cat([share[3] for share in shares], dim=1), weights)


def test_each_share_has_a_thread_and_torch_uses_no_others_in_it(num_threads):
    num_threads(2)
    together = threading.Barrier(2, timeout=20)

    def work(*_):
        together.wait()  # passes only when both shares are at work at once
        return threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()

    shares = in_row_shares(work, *made(6), None)
    assert len({ident for ident, _, _ in shares}) == 2
    assert [(number, has_grad) for _, number, has_grad in shares] == [(1, False), (1, False)]
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()


def test_what_comes_last_in_time_does_not_come_first_in_order(num_threads):
    num_threads(2)
    second_is_done = threading.Event()

    def work(x, *_):
        if float(x[0, 0, 0]) == 0:
            assert second_is_done.wait(20)
        else:
            second_is_done.set()
        return float(x[0, 0, 0])

    assert in_row_shares(work, *made(4), None) == [0.0, 16.0]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_after_an_error_the_number_of_threads_is_as_before(number, num_threads):
    num_threads(number)

    def work(x, *_):
        raise RuntimeError(f"row {int(x[0, 0, 0]) // 8}")

    with pytest.raises(RuntimeError, match="row 0"):
        in_row_shares(work, *made(6), None)
    assert torch.get_num_threads() == number


def seen_by_a_new_thread() -> int:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_are_started_later_have_as_many_as_before(fails, num_threads):
    num_threads(3)

    def work(*_):
        if fails:
            raise RuntimeError("no")

    if fails:
        with pytest.raises(RuntimeError, match="no"):
            in_row_shares(work, *made(6), None)
    else:
        in_row_shares(work, *made(6), None)
    assert torch.get_num_threads() == seen_by_a_new_thread() == 3


def test_little_work_is_not_shared(num_threads, monkeypatch):
    num_threads(2)
    monkeypatch.setattr(threads, "_WORTH_A_THREAD", 50)
    x, lo, hi = made(6)  # 96 elements: less than two threads are worth
    main = threading.get_ident()
    assert in_row_shares(lambda *_: threading.get_ident(), x, lo, hi, None) == [main]
    x, lo, hi = made(7)
    assert len(in_row_shares(lambda *_: threading.get_ident(), x, lo, hi, None)) == 2
