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


def spec(name, memory_gib=None, **fields):
    """Return the description of a model with the given memory and fields of the models file."""
    entry = ModelEntry(model="/", **fields)
    memory = memory_gib and ModelMemory(memory_gib << 30, 0)
    return ModelSpec(name=name, triton_name=name, path="/", entry=entry, memory=memory)


async def use(control, repository, name="a", duration_s=0.0):
    """Run a request that uses a model, and check that the model is loaded."""
    async with control.using(name):
        assert name in repository.loaded
        repository.running += 1
        try:
            await asyncio.sleep(duration_s)
        finally:
            repository.running -= 1


async def begin_use(control, repository):
    """Return the task of a request that uses the model `a` for 0.2 s, once the request runs."""
    task = asyncio.create_task(use(control, repository, "a", duration_s=0.2))
    while not repository.running:
        await asyncio.sleep(0.001)
    return task


async def test_requests_at_the_same_time_load_a_model_once():
    repository = FakeRepository()
    control = ModelControl([spec("a")], repository)
    await asyncio.gather(*(use(control, repository, "a") for _ in range(9)))
    assert repository.calls == [("load", "a")]


async def test_a_model_that_the_server_has_loaded_is_not_loaded_again():
    repository = FakeRepository(["a"])
    await use(ModelControl([spec("a")], repository), repository, "a")
    assert repository.calls == []


async def test_an_idle_model_is_unloaded_and_loaded_again():
    repository = FakeRepository()
    control = ModelControl([spec("a", idle_unload_s=1)], repository)
    await use(control, repository, duration_s=1.2)
    await asyncio.sleep(1.7)
    assert repository.calls == [("load", "a"), ("unload", "a")]
    assert control.is_unloaded("a")
    await use(control, repository, "a")
    assert repository.calls[-1] == ("load", "a")
    await control.close()


async def test_the_idle_time_begins_when_the_server_has_loaded_the_model():
    repository = FakeRepository()
    control = ModelControl([spec("a", idle_unload_s=1)], repository)
    await asyncio.sleep(1.3)  # the time in which the server starts and loads the model
    repository.loaded.add("a")
    await asyncio.sleep(0.5)
    assert repository.calls == []
    await asyncio.sleep(2.2)
    assert repository.calls == [("unload", "a")]
    await control.close()


async def test_an_idle_model_with_changed_weights_stays_loaded():
    repository = FakeRepository()
    control = ModelControl([spec("a", idle_unload_s=1)], repository)
    await use(control, repository, "a")
    with control.changing("a"):
        pass
    await asyncio.sleep(1.8)
    assert repository.calls == [("load", "a")]
    await control.close()


async def test_unloading_waits_for_requests_and_rejects_further_ones():
    repository = FakeRepository()
    control = ModelControl([spec("a")], repository)
    running_request = await begin_use(control, repository)
    unloading = asyncio.create_task(control.unload(control.specs[0]))
    await asyncio.sleep(0.05)  # the unloading begins, and waits for the running request

    with pytest.raises(ApiError, match="POST /v1/models/a/load") as raised:
        await use(control, repository, "a")
    assert raised.value.status == 404

    await asyncio.gather(running_request, unloading)
    await control.load(control.specs[0])
    await use(control, repository, "a")
    assert repository.calls == [("load", "a"), ("unload", "a"), ("load", "a")]


async def test_a_model_that_could_not_be_unloaded_answers_requests():
    repository = FakeRepository()
    control = ModelControl([spec("a")], repository)
    running_request = await begin_use(control, repository)
    with pytest.raises(TimeoutError):  # as with a request that has the header X-Request-Timeout
        await asyncio.wait_for(control.unload(control.specs[0]), 0.05)
    await use(control, repository, "a")
    await running_request
    assert repository.calls == [("load", "a")]


async def test_a_model_that_cannot_be_loaded_is_a_503_with_the_reason():
    repository = FakeRepository()
    repository.failure = "no such file"
    control = ModelControl([spec("a")], repository)
    with pytest.raises(ApiError, match="'a' cannot be loaded: no such file") as raised:
        await use(control, repository, "a")
    assert raised.value.status == 503
    repository.failure = None
    await use(control, repository, "a")


async def test_a_restarted_server_gets_its_model_again():
    repository = FakeRepository()
    control = ModelControl([spec("a")], repository)
    await use(control, repository, "a")
    repository.loaded.clear()  # the server was restarted
    with pytest.raises(BackendError):
        async with control.using("a"):
            raise BackendError("UNAVAILABLE", "unknown model")
    await use(control, repository, "a")
    assert repository.calls == [("load", "a")] * 2


async def test_a_model_that_a_restarted_server_has_loaded_at_its_start_is_not_loaded_again():
    repository = FakeRepository()
    control = ModelControl([spec("a"), spec("b")], repository)
    await control._unload(control._states["a"])  # the model is idle
    repository.calls.clear()
    repository.loaded.add("a")  # the server was restarted
    await use(control, repository, "a")
    assert repository.calls == []


@pytest.mark.parametrize("seed", range(8))
async def test_no_order_of_calls_takes_a_model_from_a_request(seed):
    randomness = random.Random(seed)
    repository = FakeRepository()
    (model,) = models = [spec("a")]
    control = ModelControl(models, repository)

    async def use_unless_unloaded():
        try:
            await use(control, repository, "a", duration_s=randomness.random() / 30)
        except ApiError as error:
            assert error.code == "model_unloaded"  # noqa: PT017 - any other error is a failure

    async def call():
        await asyncio.sleep(randomness.random() / 10)
        action = randomness.choice(["use", "use", "use", "load", "unload"])
        if action == "use":
            await use_unless_unloaded()
        elif action == "load":
            await control.load(model)
        else:
            await control.unload(model)

    await asyncio.gather(*(call() for _ in range(60)))  # `FakeRepository` checks each unload
    await control.load(model)
    await use(control, repository, "a")


def with_budget(total_gib, loaded=(), **memory_gib):
    """Return a model control with a memory budget, and its repository.

    Args:
        total_gib: the budget in GiB.
        loaded: the names of the models that the repository has loaded already.
        memory_gib: the memory of each model in GiB.
    """
    specs = [spec(name, size) for name, size in memory_gib.items()]
    repository = BudgetRepository(total_gib, memory_gib, loaded)
    return ModelControl(specs, repository, total_gib << 30), repository


class BudgetRepository(FakeRepository):
    """A model repository that checks after each load that the loaded models fit into the budget."""

    def __init__(self, total_gib, memory_gib, loaded):
        super().__init__(loaded)
        self.total_gib, self.memory_gib = total_gib, memory_gib
        self.users = dict.fromkeys(memory_gib, 0)

    async def load_model(self, name):
        await super().load_model(name)
        assert sum(self.memory_gib[loaded_name] for loaded_name in self.loaded) <= self.total_gib

    async def unload_model(self, name):
        self.calls.append(("unload", name))
        assert not self.users[name]
        await asyncio.sleep(0.01)
        self.loaded.discard(name)


async def test_the_model_that_was_used_first_makes_room():
    control, repository = with_budget(total_gib=5, a=2, b=2, c=2, d=4)
    for name in ("a", "b", "a", "c", "d"):
        await use(control, repository, name)
    loads = [("load", "a"), ("load", "b"), ("unload", "b"), ("load", "c")]
    assert repository.calls == [*loads, ("unload", "a"), ("unload", "c"), ("load", "d")]


async def test_a_model_that_the_server_has_loaded_already_counts():
    control, repository = with_budget(total_gib=3, loaded=["a"], a=2, b=2)
    await use(control, repository, "b")
    assert repository.calls == [("unload", "a"), ("load", "b")]


async def test_a_model_that_a_restarted_server_has_loaded_at_its_start_counts():
    control, repository = with_budget(total_gib=4, a=2, b=2, c=2)
    for name in "abc":  # loading the model c unloads the model a
        await use(control, repository, name)
    repository.loaded = {"a", "b"}  # the server was restarted, and has loaded its first models
    with pytest.raises(BackendError):
        async with control.using("c"):
            raise BackendError("UNAVAILABLE", "unknown model")
    await use(control, repository, "c")  # `load_model` checks that the budget is not exceeded


async def test_a_model_with_requests_stays_and_the_other_one_is_refused_with_the_numbers():
    control, repository = with_budget(total_gib=3, a=2, b=2)
    _, model_b = control.specs
    running_request = await begin_use(control, repository)

    message = "'b' cannot be loaded: The model needs 2 GiB, but memory_budget is 3 GiB, and models"
    with pytest.raises(ApiError, match=message) as raised:
        await use(control, repository, "b")
    assert raised.value.status == 503
    with pytest.raises(BackendError, match="use a 2 GiB"):
        await control.load(model_b)

    await running_request
    await use(control, repository, "b")
    assert repository.calls == [("load", "a"), ("unload", "a"), ("load", "b")]


async def test_a_model_that_could_not_be_unloaded_still_counts():
    control, repository = with_budget(total_gib=3, a=2, b=2)
    await use(control, repository, "a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(control, repository, "b"), 0.005)
    await use(control, repository, "b")
    assert repository.loaded == {"b"}


async def test_a_model_that_a_client_has_changed_is_only_unloaded_by_a_client():
    control, repository = with_budget(total_gib=3, a=2, b=2)
    _, model_b = control.specs

    # A change that the server refuses does not count.
    await use(control, repository, "a")
    with pytest.raises(BackendError), control.changing("a"):
        raise BackendError("INVALID_ARGUMENT", "path: there is no such folder")
    await use(control, repository, "b")

    with control.changing("b"):
        pass
    with pytest.raises(ApiError, match="or changed weights use b 2 GiB"):
        await use(control, repository, "a")

    await control.unload(model_b)
    await use(control, repository, "a")
    await control.load(model_b)  # the model b has its original weights again
    await use(control, repository, "a")


async def test_a_refused_change_does_not_release_a_model_that_another_client_changes():
    control, repository = with_budget(total_gib=3, a=2, b=2)
    await use(control, repository, "a")
    # The refused change begins before the other change and ends during the other change. A `with`
    # statement cannot express this.
    refused_change = control.changing("a")
    refused_change.__enter__()
    with control.changing("a"):
        error = BackendError("INVALID_ARGUMENT", "path: there is no such folder")
        assert not refused_change.__exit__(BackendError, error, None)
        with pytest.raises(ApiError, match="or changed weights use a 2 GiB"):
            await use(control, repository, "b")
    with pytest.raises(ApiError, match="or changed weights use a 2 GiB"):
        await use(control, repository, "b")


async def test_a_model_that_fails_to_load_frees_its_memory():
    control, repository = with_budget(total_gib=3, a=2, b=2)
    repository.failure = "no such file"
    with pytest.raises(ApiError, match="no such file"):
        await use(control, repository, "a")
    repository.failure = None
    await use(control, repository, "b")
    assert repository.calls == [("load", "a"), ("load", "b")]


@pytest.mark.parametrize("seed", range(6))
async def test_no_order_of_requests_exceeds_the_budget(seed):
    randomness = random.Random(seed)
    control, repository = with_budget(total_gib=5, a=1, b=2, c=3, d=4)

    async def use_a_random_model():
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

    # After each load, `BudgetRepository` checks the budget.
    await asyncio.gather(*(use_a_random_model() for _ in range(60)))
    for name in "abcd":
        await use(control, repository, name)
