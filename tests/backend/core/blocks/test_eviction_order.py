from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.core.blocks.eviction_order import EvictionOrder, SessionKey

A, B = SessionKey("", "a"), SessionKey("", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def order_of(items, clock=None, max_retained=100):
    order = EvictionOrder(max_retained, clock or Clock())
    for item in items:
        order.add(item)
    return order


def popped(order):
    return [order.pop() for _ in range(len(order))]


def test_without_sessions_the_oldest_item_is_evicted_first():
    order = order_of([1, 2, 3])
    order.remove(1)
    order.add(1)
    assert popped(order) == [2, 3, 1]


def test_items_of_a_session_are_evicted_last():
    order = order_of([1, 2, 3, 4])
    order.retain([1, 2], A, 10)
    assert popped(order) == [3, 4, 1, 2]


def test_a_large_session_does_not_evict_a_small_one():
    order = order_of(range(6))
    order.retain([4, 5], B, 10)
    order.retain([0, 1, 2, 3], A, 10)
    assert popped(order)[:2] == [0, 1]


def test_of_equal_sessions_the_one_that_was_used_longest_ago_loses_an_item():
    order = order_of(range(4))
    order.retain([0, 1], A, 10)
    order.retain([2, 3], B, 10)
    order.retain([0], A, 10)
    assert order.pop() == 2


def test_items_of_an_expired_session_are_the_oldest():
    clock = Clock()
    order = order_of([1, 2, 3, 4], clock)
    order.retain([3, 4], A, 10)
    clock.now = 11
    assert popped(order) == [3, 4, 1, 2]
    assert order.sessions() == []


def test_a_longer_time_replaces_a_shorter_time_and_not_the_reverse():
    clock = Clock()
    order = order_of([1, 2], clock)
    order.retain([1], A, 100)
    order.retain([1, 2], B, 10)
    assert [(key, count) for key, count, _ in order.sessions()] == [(A, 1), (B, 1)]
    assert order.extend(B, 200)
    order.retain([1], B, 10)
    assert [(key, count) for key, count, _ in order.sessions()] == [(B, 2)]
    assert not order.extend(A, 5)


def test_with_too_many_retained_items_age_decides():
    order = order_of([1, 2, 3], max_retained=1)
    order.retain([2, 3], A, 10)
    order.add(4)
    # Item 1 is older than the session, and the session is older than item 4.
    assert popped(order) == [1, 2, 4, 3]


def test_an_item_in_use_stays_in_its_session():
    order = order_of([1, 2])
    order.retain([1], A, 10)
    order.remove(1)
    assert 1 not in order
    assert order.num_retained == 1
    order.add(1)
    assert popped(order) == [2, 1]


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "pop", "forget", "retain", "wait", "extend"]),
        st.integers(0, 9),
        st.sampled_from([A, B]),
    ),
    max_size=60,
)


@given(operations)
def test_the_idle_items_are_those_that_were_added_and_not_removed(steps):
    clock = Clock()
    order: EvictionOrder[int] = EvictionOrder(3, clock)
    idle: set[int] = set()  # the expected items of `order`
    cached: set[int] = set()  # the idle items and the items in use
    for name, item, key in steps:
        if name == "add" and item not in idle:
            order.add(item)
            idle.add(item)
            cached.add(item)
        elif name == "remove" and item in idle:
            order.remove(item)
            idle.discard(item)
        elif name == "pop" and idle:
            evicted = order.pop()
            assert evicted in idle
            idle.discard(evicted)
            cached.discard(evicted)
        elif name == "forget":
            order.forget(item)
            idle.discard(item)
            cached.discard(item)
        elif name == "retain":
            order.retain([each for each in (item, (item + 1) % 10) if each in cached], key, 5)
        elif name == "extend":
            order.extend(key, 5)  # seconds
        elif name == "wait":
            clock.now += item
        assert set(order) == idle
        assert len(order) == len(idle)
        assert {each for each in range(10) if each in order} == idle
        assert order.num_retained <= len(cached)
        assert sum(count for _, count, _ in order.sessions()) == order.num_retained
    assert sorted(popped(order)) == sorted(idle)
