"""Models are loaded by requests, unloaded when they are idle, and never while a request runs."""

import asyncio
import random

import pytest
from nereid_client.errors import ApiError, BackendError
from nereid_client.several_models.model_control import ModelControl
from nereid_client.several_models.models_file import ModelEntry, ModelSpec

pytestmark = pytest.mark.anyio


class FakeRepository:
    """A model repository that records its calls, and checks that no request loses its model."""

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


def spec(name="a", **fields):
    return ModelSpec(name=name, triton_name=name, path="/", entry=ModelEntry(model="/", **fields))


async def use(control, repository, seconds=0.0):
    async with control.using("a"):
        assert "a" in repository.loaded
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
