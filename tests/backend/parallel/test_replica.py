"""Tests of the settings and the GPUs of each engine process if there are several processes."""

import os

import pytest
import torch
from backend.serving.fake_server import DEMO
from nereid_backend import EngineConfig
from nereid_backend.cpu_threads import usable_cpus
from nereid_backend.errors import ConfigError
from nereid_backend.parallel.replica import own_gpus, prepare_replica


def config(**settings):
    return EngineConfig(model=str(DEMO / "chat"), device="cpu", **settings)


@pytest.mark.parametrize(
    ("visible", "index", "num_own", "own"),
    [("", 2, 1, "2"), ("", 1, 2, "2,3"), ("4,5,6,7", 1, 2, "6,7"), ("GPU-a, GPU-b", 1, 1, "GPU-b")],
)
def test_each_process_gets_its_own_gpus(visible, index, num_own, own):
    assert own_gpus(visible, index, num_own) == own


def test_the_processes_share_the_cpus_and_the_disk_and_have_different_seeds():
    one = config(prefix_cache_disk_bytes=2**30)
    assert prepare_replica(one, 0) == one
    two = config(data_parallel_size=2, prefix_cache_disk_bytes=2**30)
    replicas = [prepare_replica(two, index) for index in range(2)]
    assert [replica.seed for replica in replicas] == [0, 1]
    for replica in replicas:
        assert replica.num_threads == max(1, (usable_cpus() - 1) // 2)
        assert replica.prefix_cache_disk_size == 2**29


def test_a_process_sees_only_its_own_gpus_and_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    model = str(DEMO / "chat")
    prepare_replica(EngineConfig(model=model, data_parallel_size=3), 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    config = EngineConfig(model=model, data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="2 engine processes of 2 GPUs each need 4 GPUs, but"):
        prepare_replica(config, 0)


def test_a_single_gpu_cannot_be_chosen_for_several_processes():
    with pytest.raises(ConfigError, match="data_parallel_size is 2, but it is cuda:1"):
        EngineConfig(model=str(DEMO / "chat"), device="cuda:1", data_parallel_size=2)
