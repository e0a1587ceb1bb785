"""Tests that requests load models, and that only models without running requests are unloaded."""

import asyncio
import random

import pytest
from nereid_client.errors import ApiError, BackendError
from nereid_client.several_models.model_control import ModelControl
from nereid_client.several_models.model_memory import ModelMemory
from nereid_client.several_models.models_file import ModelEntry, ModelSpec

pytestmark = pytest.mark.anyio


class FakeRepository:
    """A model repository that records all calls.

    The repository checks that no model is unloaded while a request uses it.
    """

    def __init__(self, loaded=()):
        self.loaded = set(loaded)
        self.calls = []
        self.running = 0
        self.failure = None

    async def load_model(self, name):
        self.calls.append(("load", name))
        await asyncio.sleep(0.01)
        if self.failure:
            raise BackendError("INTERNAL", self.failure)
        self.loaded.add(name)

    async def unload_model(self, name):
        assert self.running == 0
        self.calls.append(("unload", name))
        self.loaded.discard(name)
        await asyncio.sleep(0.01)

    async def is_model_ready(self, name):
        return name in self.loaded

    async def uses_memory(self, names):
        return not self.loaded.isdisjoint(names)


def spec(name="a", memory=None, **fields):
    entry = ModelEntry(model="/", **fields)
    memory = None if memory is None else ModelMemory(memory << 30, 0)
    return ModelSpec(name=name, triton_name=name, path="/", entry=entry, memory=memory)


async def use(control, repository, seconds=0.0, name="a"):
    async with control.using(name):
        assert name in repository.loaded
        repository.running += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            repository.running -= 1


async def test_requests_at_the_same_time_load_a_model_once():
    repository = FakeRepository()
    control = ModelControl([spec()], repository)
    await asyncio.gather(*(use(control, repository) for _ in range(9)))
    assert repository.calls == [("load", "a")]


async def test_a_model_that_the_server_has_loaded_is_not_loaded_again():
    repository = FakeRepository(["a"])
    await use(ModelControl([spec()], repository), repository)
    assert repository.calls == []


async def test_an_idle_model_is_unloaded_and_loaded_again():
    repository = FakeRepository()
    control = ModelControl([spec(idle_unload_s=1)], repository)
    await use(control, repository, 1.2)
    await asyncio.sleep(1.7)
    assert repository.calls == [("load", "a"), ("unload", "a")]
    assert control.is_unloaded("a")
    await use(control, repository)
    assert repository.calls[-1] == ("load", "a")
    await control.close()


async def test_the_idle_time_begins_when_the_server_has_loaded_the_model():
    repository = FakeRepository()
    control = ModelControl([spec(idle_unload_s=1)], repository)
    await asyncio.sleep(1.3)  # the time in which the server starts and loads the model
    repository.loaded.add("a")
    await asyncio.sleep(0.5)
    assert repository.calls == []
    await asyncio.sleep(2.2)
    assert repository.calls == [("unload", "a")]
    await control.close()


async def test_an_idle_model_with_changed_weights_stays_loaded():
    repository = FakeRepository()
    control = ModelControl([spec(idle_unload_s=1)], repository)
    await use(control, repository)
    with control.changing("a"):
        pass
    await asyncio.sleep(1.8)
    assert repository.calls == [("load", "a")]
    await control.close()


async def test_unloading_waits_for_requests_and_rejects_further_ones():
    repository = FakeRepository()
    control = ModelControl([spec()], repository)
    running = asyncio.create_task(use(control, repository, 0.3))
    await asyncio.sleep(0.1)
    unloading = asyncio.create_task(control.unload(control.specs[0]))
    await asyncio.sleep(0.05)
    with pytest.raises(ApiError, match="POST /v1/models/a/load") as caught:
        await use(control, repository)
    assert caught.value.status == 404
    await asyncio.gather(running, unloading)
    await control.load(control.specs[0])
    await use(control, repository)
    assert repository.calls == [("load", "a"), ("unload", "a"), ("load", "a")]


async def test_a_model_that_could_not_be_unloaded_answers_requests():
    repository = FakeRepository()
    control = ModelControl([spec()], repository)
    running = asyncio.create_task(use(control, repository, 0.3))
    await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):  # as with a request that has the header X-Request-Timeout
        await asyncio.wait_for(control.unload(control.specs[0]), 0.05)
    await use(control, repository)
    await running
    assert repository.calls == [("load", "a")]


async def test_a_model_that_cannot_be_loaded_is_a_503_with_the_reason():
    repository = FakeRepository()
    repository.failure = "no such file"
    control = ModelControl([spec()], repository)
    with pytest.raises(ApiError, match="'a' cannot be loaded: no such file") as caught:
        await use(control, repository)
    assert caught.value.status == 503
    repository.failure = None
    await use(control, repository)


async def test_a_restarted_server_gets_its_model_again():
    repository = FakeRepository()
    control = ModelControl([spec()], repository)
    await use(control, repository)
    repository.loaded.clear()  # the server was restarted
    with pytest.raises(BackendError):
        async with control.using("a"):
            raise BackendError("UNAVAILABLE", "unknown model")
    await use(control, repository)
    assert repository.calls == [("load", "a")] * 2


async def test_a_model_that_a_restarted_server_has_loaded_at_its_start_is_not_loaded_again():
    repository = FakeRepository()
    control = ModelControl([spec(), spec("b")], repository)
    await control._unload(control._states["a"])  # the model is idle
    repository.calls.clear()
    repository.loaded.add("a")  # the server was restarted
    await use(control, repository)
    assert repository.calls == []


@pytest.mark.parametrize("seed", range(8))
async def test_no_order_of_calls_takes_a_model_from_a_request(seed):
    randomness = random.Random(seed)
    repository = FakeRepository()
    control = ModelControl([spec()], repository)

    async def call():
        await asyncio.sleep(randomness.random() / 10)
        action = randomness.choice(["use", "use", "use", "load", "unload"])
        if action == "use":
            try:
                await use(control, repository, randomness.random() / 30)
            except ApiError as error:
                assert error.code == "model_unloaded"  # noqa: PT017 - any other error is a failure
        else:
            await getattr(control, action)(control.specs[0])

    await asyncio.gather(*(call() for _ in range(60)))
    await control.load(control.specs[0])
    await use(control, repository)


def with_budget(gibibytes, loaded=(), **sizes):
    specs = [spec(name, size) for name, size in sizes.items()]
    repository = BudgetRepository(gibibytes, sizes, loaded)
    return ModelControl(specs, repository, gibibytes << 30), repository


class BudgetRepository(FakeRepository):
    """A model repository that checks after each load that the loaded models fit into the budget."""

    def __init__(self, gibibytes, sizes, loaded):
        super().__init__(loaded)
        self.gibibytes, self.sizes = gibibytes, sizes
        self.users = dict.fromkeys(sizes, 0)

    async def load_model(self, name):
        await super().load_model(name)
        assert sum(self.sizes[other] for other in self.loaded) <= self.gibibytes

    async def unload_model(self, name):
        self.calls.append(("unload", name))
        assert not self.users[name]
        await asyncio.sleep(0.01)
        self.loaded.discard(name)


async def test_the_model_that_was_used_first_makes_room():
    control, repository = with_budget(5, a=2, b=2, c=2, d=4)
    for name in ("a", "b", "a", "c", "d"):
        await use(control, repository, name=name)
    loads = [("load", "a"), ("load", "b"), ("unload", "b"), ("load", "c")]
    assert repository.calls == [*loads, ("unload", "a"), ("unload", "c"), ("load", "d")]


async def test_a_model_that_the_server_has_loaded_already_counts():
    control, repository = with_budget(3, loaded=["a"], a=2, b=2)
    await use(control, repository, name="b")
    assert repository.calls == [("unload", "a"), ("load", "b")]


async def test_a_model_that_a_restarted_server_has_loaded_at_its_start_counts():
    control, repository = with_budget(4, a=2, b=2, c=2)
    for name in "abc":  # loading the model c unloads the model a
        await use(control, repository, name=name)
    repository.loaded = {"a", "b"}  # the server was restarted, and has loaded its first models
    with pytest.raises(BackendError):
        async with control.using("c"):
            raise BackendError("UNAVAILABLE", "unknown model")
    await use(control, repository, name="c")  # `load_model` checks that the budget is not exceeded


async def test_a_model_with_requests_stays_and_the_other_one_is_refused_with_the_numbers():
    control, repository = with_budget(3, a=2, b=2)
    running = asyncio.create_task(use(control, repository, 0.3))
    await asyncio.sleep(0.1)
    message = "'b' cannot be loaded: The model needs 2 GiB, but memory_budget is 3 GiB, and models"
    with pytest.raises(ApiError, match=message) as caught:
        await use(control, repository, name="b")
    assert caught.value.status == 503
    with pytest.raises(BackendError, match="use a 2 GiB"):
        await control.load(control.specs[1])
    await running
    await use(control, repository, name="b")
    assert repository.calls == [("load", "a"), ("unload", "a"), ("load", "b")]


async def test_a_model_that_could_not_be_unloaded_still_counts():
    control, repository = with_budget(3, a=2, b=2)
    await use(control, repository)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(control, repository, name="b"), 0.005)
    await use(control, repository, name="b")
    assert repository.loaded == {"b"}


async def test_a_model_that_a_client_has_changed_is_only_unloaded_by_a_client():
    control, repository = with_budget(3, a=2, b=2)
    await use(control, repository)
    with pytest.raises(BackendError), control.changing("a"):
        raise BackendError("INVALID_ARGUMENT", "path: there is no such folder")
    await use(control, repository, name="b")
    with control.changing("b"):
        pass
    with pytest.raises(ApiError, match="or changed weights use b 2 GiB"):
        await use(control, repository)
    await control.unload(control.specs[1])
    await use(control, repository)
    await control.load(control.specs[1])
    await use(control, repository)


async def test_a_refused_change_does_not_release_a_model_that_another_client_changes():
    control, repository = with_budget(3, a=2, b=2)
    await use(control, repository)
    refused = control.changing("a")
    refused.__enter__()
    with control.changing("a"):
        error = BackendError("INVALID_ARGUMENT", "path: there is no such folder")
        assert not refused.__exit__(BackendError, error, None)
        with pytest.raises(ApiError, match="or changed weights use a 2 GiB"):
            await use(control, repository, name="b")
    with pytest.raises(ApiError, match="or changed weights use a 2 GiB"):
        await use(control, repository, name="b")


async def test_a_model_that_fails_to_load_frees_its_memory():
    control, repository = with_budget(3, a=2, b=2)
    repository.failure = "no such file"
    with pytest.raises(ApiError, match="no such file"):
        await use(control, repository)
    repository.failure = None
    await use(control, repository, name="b")
    assert repository.calls == [("load", "a"), ("load", "b")]


@pytest.mark.parametrize("seed", range(6))
async def test_no_order_of_requests_exceeds_the_budget(seed):
    randomness = random.Random(seed)
    control, repository = with_budget(5, a=1, b=2, c=3, d=4)

    async def call():
        await asyncio.sleep(randomness.random() / 5)
        name = randomness.choice("abcd")
        try:
            async with control.using(name):
                assert name in repository.loaded
                repository.users[name] += 1
                await asyncio.sleep(randomness.random() / 50)
                repository.users[name] -= 1
        except ApiError as error:
            assert error.code == "model_not_loaded"  # noqa: PT017 - any other error is a failure

    await asyncio.gather(*(call() for _ in range(60)))
    for name in "abcd":
        await use(control, repository, name=name)
