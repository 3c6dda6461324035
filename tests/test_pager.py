"""The pager: a fixed pool of pages over a source, and pages on the host that are verified as they are read (I3, I8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine_adapter.pager import Pager
from engine_adapter.pages import HostPages
from repo_service.domain.errors import InvalidInput, PageCorrupt

SHAPE = (2, 3, 4, 5)
CPU = torch.device("cpu")


class Counted:
    """Pages full of their number, each read noted and, if asked for, held up."""

    def __init__(self) -> None:
        self.reads: list[Hashable] = []
        self.gate: threading.Event | None = None
        self.fails: set[Hashable] = set()

    def read(self, key: Hashable, out: Tensor) -> None:
        self.reads.append(key)
        if self.gate is not None:
            assert self.gate.wait(30)
        if key in self.fails:
            raise PageCorrupt(f"page {key} is damaged")
        assert isinstance(key, int)
        out.fill_(key)


@pytest.fixture
def source() -> Counted:
    return Counted()


@pytest.fixture
def pager_of(source: Counted) -> Iterator[Callable[..., Pager]]:
    made = []

    def make(pages: int, prefetch: bool = False) -> Pager:
        made.append(Pager(pages, SHAPE, torch.float32, CPU, source, prefetch=prefetch))
        return made[-1]

    yield make
    for pager in made:
        pager.close()


def use(pager: Pager, *keys: int, scan: bool = False) -> None:
    """Pin pages and see that they are those asked for."""
    with pager.pinned(keys, scan=scan) as pages:
        assert [page.unique().tolist() for page in pages] == [[key] for key in keys]
        assert all(page.shape == SHAPE for page in pages)


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_the_least_recently_used_page_gives_way(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(3)
    for key in (1, 2, 3, 1, 4, 1, 2):
        use(pager, key)
    assert source.reads == [1, 2, 3, 4, 2]
    counters = pager.counters
    assert (counters.hits, counters.misses, counters.evictions, counters.prefetched) == (2, 5, 2, 0)
    assert counters.bytes_read == 5 * pager.page_bytes


def test_a_scan_longer_than_the_pool_still_hits(pager_of: Callable[..., Pager]) -> None:
    plain, scanned = pager_of(4), pager_of(4)
    for _ in range(3):
        for key in range(6):
            use(plain, key)
            use(scanned, key, scan=True)
    assert plain.counters.hits == 0
    assert scanned.counters.hits == 8


@given(pages=st.integers(1, 4), wanted=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=20))
def test_every_page_pinned_is_the_page_asked_for(pages: int, wanted: list[list[int]]) -> None:
    with Pager(pages, SHAPE, torch.float32, CPU, Counted(), prefetch=False) as pager:
        for keys in wanted:
            if len(set(keys)) <= pages:
                use(pager, *keys)
                continue
            with pytest.raises(InvalidInput, match=f"{len(set(keys))} pages .* pool's {pages}"), pager.pinned(keys):
                pass
        assert pager.counters.peak_bytes == pages * 2 * 3 * 4 * 5 * 4


def test_pinned_pages_stay(pager_of: Callable[..., Pager]) -> None:
    pager = pager_of(2)
    with pager.pinned([7]) as (held,):
        for key in range(5):
            use(pager, key)
        assert held.unique().tolist() == [7]
        with pager.pinned([8]), pytest.raises(InvalidInput, match="1 pages were asked for at once"), pager.pinned([9]):
            pass
    use(pager, 8, 7)


def test_a_page_asked_for_twice_at_once_is_one_page(pager_of: Callable[..., Pager]) -> None:
    pager = pager_of(1)
    with pager.pinned([3, 3]) as (one, other):
        assert one.data_ptr() == other.data_ptr()
    assert pager.counters.misses == 1


def test_a_pool_of_one_page_works_with_prefetch(pager_of: Callable[..., Pager]) -> None:
    pager = pager_of(1, prefetch=True)
    for key in range(50):
        pager.prefetch([key + 1, key + 2])
        use(pager, key)


@pytest.mark.parametrize("pages", [0, -1, 1.5, None])
def test_a_pool_without_a_page_is_refused(pages: object, source: Counted) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        Pager(pages, SHAPE, torch.float32, CPU, source)  # type: ignore[arg-type]


def test_a_pool_larger_than_the_device_is_refused(source: Counted) -> None:
    with pytest.raises(InvalidInput, match="can't be had on cpu"):
        Pager(2**50, SHAPE, torch.float32, CPU, source)


def test_pages_read_ahead_are_hits(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(4, prefetch=True)
    pager.prefetch([1, 2, 3])
    until(lambda: pager.counters.prefetched == 3)
    use(pager, 1, 2, 3)
    assert sorted(map(int, source.reads)) == [1, 2, 3]  # type: ignore[call-overload]
    assert (pager.counters.hits, pager.counters.misses) == (3, 0)


def test_prefetch_returns_at_once_and_evicts_no_pinned_page(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(2, prefetch=True)
    with pager.pinned([1, 2]) as (one, two):
        began = time.monotonic()
        pager.prefetch(range(3, 100))
        assert time.monotonic() - began < 1
        time.sleep(0.02)
        assert (source.reads, pager.counters.prefetched) == ([1, 2], 0)
        assert (one.unique().tolist(), two.unique().tolist()) == ([1], [2])
    until(lambda: pager.counters.prefetched == 2)
    use(pager, 3, 4)


def test_a_page_on_its_way_is_waited_for_and_not_read_again(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(2, prefetch=True)
    source.gate = threading.Event()
    pager.prefetch([1])
    until(lambda: source.reads == [1])
    threading.Timer(0.05, source.gate.set).start()
    use(pager, 1)
    assert source.reads == [1]
    assert pager.counters.stall_s > 0.03


def test_stalls_are_counted_and_prefetch_takes_them_away() -> None:
    class Slow(Counted):
        def read(self, key: Hashable, out: Tensor) -> None:
            time.sleep(0.01)
            super().read(key, out)

    def stall(prefetch: bool) -> float:
        with Pager(4, SHAPE, torch.float32, CPU, Slow(), prefetch=prefetch) as pager:
            for key in range(8):
                pager.prefetch([key, key + 1, key + 2])
                use(pager, key, scan=True)
                time.sleep(0.03)
            return pager.counters.stall_s

    assert stall(prefetch=False) >= 0.08
    assert stall(prefetch=True) < 0.06


def test_a_page_that_was_forgotten_is_read_anew(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(2)
    use(pager, 1)
    pager.forget(1)
    pager.forget(5)
    use(pager, 1)
    assert source.reads == [1, 1]
    with pager.pinned([1]) as (held,):
        pager.forget(1)
        use(pager, 1)
        assert held.unique().tolist() == [1]
    use(pager, 2, 3)
    assert pager.counters.misses == 5


def test_a_page_in_the_pool_is_amended_in_place(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(1, prefetch=True)
    pager.amend(1, lambda page: page.fill_(5))
    use(pager, 1)
    pager.amend(1, lambda page: page.fill_(9))
    with pager.pinned([1]) as (page,):
        assert page.unique().tolist() == [9]
    source.gate = threading.Event()
    pager.prefetch([2])
    until(lambda: source.reads == [1, 2])
    pager.amend(2, lambda page: page.fill_(9))
    source.gate.set()
    use(pager, 2)
    assert source.reads == [1, 2, 2]


def test_a_page_forgotten_on_its_way_is_read_anew(pager_of: Callable[..., Pager], source: Counted) -> None:
    pager = pager_of(1, prefetch=True)
    source.gate = threading.Event()
    pager.prefetch([1])
    until(lambda: source.reads == [1])
    pager.forget(1)
    source.gate.set()
    use(pager, 1)
    assert source.reads == [1, 1]


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_damaged_page_is_an_error_for_whoever_pins_it(
    pager_of: Callable[..., Pager], source: Counted, prefetch: bool
) -> None:
    pager = pager_of(2, prefetch=prefetch)
    source.fails = {2}
    pager.prefetch([2])
    for _ in range(3):
        with pytest.raises(PageCorrupt), pager.pinned([1, 2]):
            pass
    use(pager, 1, 3)
    source.fails = set()
    use(pager, 2, 1)


def test_threads_share_a_pool(pager_of: Callable[..., Pager]) -> None:
    pager = pager_of(6, prefetch=True)

    def work(number: int) -> None:
        for step in range(150):
            first = (number * 7 + step * 3) % 10
            pager.prefetch([first + 1, first + 2])
            if step % 11 == 0:
                pager.forget(first)
            use(pager, first, (first + 5) % 10, scan=step % 2 == 0)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert pager.counters.hits + pager.counters.misses == 3 * 150 * 2


def test_a_closed_pager_has_no_thread_and_no_pages(pager_of: Callable[..., Pager]) -> None:
    pager = pager_of(2, prefetch=True)
    use(pager, 1)
    pager.close()
    pager.close()
    assert all(thread.name != "kvgraft-prefetch" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"), pager.pinned([2]):
        pass


# Pages on the host


@pytest.fixture(params=["memory", "file"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostPages]:
    with HostPages(SHAPE, torch.bfloat16, tmp_path if request.param == "file" else None) as pages:
        yield pages


def read(pages: HostPages, key: Hashable) -> Tensor:
    out = torch.full(SHAPE, -1.0, dtype=torch.bfloat16)
    pages.read(key, out)
    return out


def test_pages_are_read_as_they_were_written(host: HostPages) -> None:
    whole = torch.randn(SHAPE).bfloat16()
    host.write("whole", whole)
    host.write("grown", whole[:, :, :1])
    host.write("grown", whole[:, :, 1:3], start=1)
    assert torch.equal(read(host, "whole"), whole)
    assert torch.equal(read(host, "grown")[:, :, :3], whole[:, :, :3])
    assert not read(host, "grown")[:, :, 3:].any()
    assert (len(host), "grown" in host, "other" in host) == (2, True, False)
    with pytest.raises(KeyError):
        read(host, "other")


def test_memory_of_freed_pages_is_used_again_and_clean(host: HostPages) -> None:
    for key in range(10):
        host.write(key, torch.ones(SHAPE).bfloat16())
    taken = host.host_bytes
    for key in range(10):
        host.free(key)
    for key in range(10, 20):
        host.write(key, torch.ones((2, 3, 1, 5)).bfloat16())
        assert read(host, key).float().sum() == 2 * 3 * 5
    assert host.host_bytes == taken


def test_i3_a_page_altered_on_the_host_is_never_handed_on(host: HostPages) -> None:
    host.write((3, 7), torch.ones(SHAPE).bfloat16())
    host._pages[3, 7].view(torch.uint8)[1, 2, 3, 4] ^= 1
    with Pager(2, SHAPE, torch.bfloat16, CPU, host) as pager:
        with pytest.raises(PageCorrupt, match=r"page \(3, 7\) is damaged"), pager.pinned([(3, 7)]):
            pass
        host.write((3, 7), torch.ones(SHAPE).bfloat16())
        with pager.pinned([(3, 7)]) as (page,):
            assert bool((page == 1).all())


def test_a_page_written_while_it_is_read_is_not_taken_for_damaged(host: HostPages) -> None:
    host.write(0, torch.zeros(SHAPE).bfloat16())
    ends = time.monotonic() + 0.5

    def rewrite() -> None:
        number = 0
        while time.monotonic() < ends:
            number += 1
            host.write(0, torch.full(SHAPE, float(number % 100)).bfloat16())

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(rewrite)
        while not writing.done():
            assert len(read(host, 0).unique()) == 1
        writing.result()


def test_a_file_of_pages_has_no_name(tmp_path: Path) -> None:
    with HostPages(SHAPE, torch.float32, tmp_path) as pages:
        pages.write(0, torch.ones(SHAPE))
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="not a directory"):
        HostPages(SHAPE, torch.float32, tmp_path / "absent")
