"""Work ahead of the consumer in threads, in order and with a bound on what lies ready.

Threads suffice: the tokenizer, gzip and the network all work outside Python's global lock. They
need no copy of the process, and since results come in order, the number of workers never changes
the data.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_END = object()


def ordered_map(
    pool: Executor, fn: Callable[[T], R], items: Iterable[T], in_flight: int
) -> Iterator[R]:
    """`map(fn, items)` with up to `in_flight` calls running or finished ahead of the consumer.

    Shuts the pool down in the end.
    """
    futures: deque[Future[R]] = deque()
    try:
        for item in items:
            futures.append(pool.submit(fn, item))
            if len(futures) >= in_flight:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        _stop(pool, futures, wait=False)


def in_background(items: Iterator[T], depth: int) -> Iterator[T]:
    """`items`, with up to `depth` of them computed ahead by one thread.

    In the end it waits for that thread: nothing uses `items` any more.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    futures: deque[Future] = deque()
    try:
        futures.extend(pool.submit(next, items, _END) for _ in range(depth))
        while (item := futures.popleft().result()) is not _END:
            futures.append(pool.submit(next, items, _END))
            yield item
    finally:
        _stop(pool, futures, wait=True)


def _stop(pool: Executor, futures: Iterable[Future], wait: bool) -> None:
    # Not shutdown(cancel_futures=True): it fails in a generator that Python's exit closes.
    for future in futures:
        future.cancel()
    pool.shutdown(wait=wait)
