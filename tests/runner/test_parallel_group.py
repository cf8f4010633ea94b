"""The collectives over gloo: what they compute, the same bits everywhere, and an end to all waiting."""

import threading

import pytest
import torch

from splittime.runner.ranks.group import RankGroup, RankLost


def together(count, folder, work, timeout_s=60.0):
    """What `work` returns for every rank, each in a thread."""
    results = [None] * count

    def live(index):
        try:
            results[index] = work(RankGroup(index, count, folder, timeout_s, lambda: None))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=live, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def part(index, size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(index)).to(dtype)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_sum_has_the_same_bits_on_every_rank(tmp_path, count):
    sizes = [(1, 1), (3, 7), (5, 1000), (64, 333)]
    found = together(count, tmp_path, lambda group: [group.sum(part(group.index, size)) for size in sizes])
    for place, size in enumerate(sizes):
        assert all(torch.equal(own[place], found[0][place]) for own in found)
        want = sum(part(index, size).double() for index in range(count))
        torch.testing.assert_close(found[0][place].double(), want, rtol=1e-5, atol=1e-5)


def test_the_first_rank_knows_what_sums_took_once(tmp_path):
    def work(group):
        group.sum(part(group.index, (64, 333)))
        return group.take_ns(), group.take_ns()

    (first, again), (other, _) = together(2, tmp_path, work)
    assert first > 0
    assert again == other == 0


def test_a_sum_is_in_place_and_of_bfloat16_too(tmp_path):
    def work(group):
        own = part(group.index, (4, 9), torch.bfloat16)
        return own, group.sum(own)

    found = together(2, tmp_path, work)
    for own, total in found:
        assert total is own
        want = part(0, (4, 9), torch.bfloat16) + part(1, (4, 9), torch.bfloat16)
        assert torch.equal(total, want)


@pytest.mark.parametrize(("count", "total"), [(2, 97), (3, 7), (4, 6), (2, 2)])
def test_columns_of_all_come_in_order(tmp_path, count, total):
    whole = part(0, (5, total))

    def work(group):
        begin, end = total * group.index // count, total * (group.index + 1) // count
        return group.join(whole[:, begin:end], total)

    assert all(torch.equal(joined, whole) for joined in together(count, tmp_path, work))


def test_numbers_come_by_rank(tmp_path):
    big = 2**53 + 1  # that a double does not hold
    assert together(3, tmp_path, lambda group: group.each(big + group.index)) == [[big, big + 1, big + 2]] * 3


def test_who_waits_too_long_is_told(tmp_path):
    """Only the first rank comes to the second collective."""
    is_over = threading.Event()

    def work(group):
        group.each(0)
        if group.index == 1:
            is_over.wait(60)
            return None
        group.set_timeout(0.3)
        try:
            return group.sum(torch.ones(3))
        finally:
            is_over.set()

    lost, _ = together(2, tmp_path, work)
    assert isinstance(lost, RankLost)
    assert "rank 0 waits for the others in vain" in str(lost)
