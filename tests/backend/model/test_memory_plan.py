from unittest.mock import Mock

import pytest
import torch
from nereid_backend import main_memory
from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.model.memory import memory_plan
from nereid_backend.pooling.load_model import gpu_share

GIB = 2**30


def test_a_pooling_model_that_exceeds_its_share_of_a_gpu_is_refused(monkeypatch):
    set_fraction = Mock()
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    device = torch.device("cuda:1")
    message = r"may use 25% of the memory of cuda:1, but its weights need more\."
    with pytest.raises(ConfigError, match=message), gpu_share(device, 0.25):
        raise torch.OutOfMemoryError("CUDA out of memory")
    set_fraction.assert_called_once_with(0.25, device)

    # `gpu_share` sets no limit for a CPU.
    with gpu_share(torch.device("cpu"), 0.25):
        pass
    set_fraction.assert_called_once()


@pytest.mark.parametrize(
    ("used_by_others", "expected"),
    [
        (0, 40 * GIB - 16 * GIB - GIB),
        # Memory that other processes use does not count, because they have their own shares of the
        # GPU.
        (20 * GIB, 40 * GIB - 16 * GIB - GIB),
        # The free memory of the GPU is also a limit.
        (60 * GIB, 80 * GIB - 60 * GIB - 16 * GIB - GIB),
    ],
)
def test_a_share_of_a_gpu_limits_this_process_alone(monkeypatch, used_by_others, expected):
    # The GPU has 80 GiB. The weights and the CUDA context of this process need 16 GiB. torch has
    # also cached 9 GiB of freed memory, which `empty_cache` gives back to the GPU.
    weights = 16 * GIB - memory_plan._CONTEXT_BYTES
    freed_memory = [9 * GIB]

    def mem_get_info(_):
        free = 80 * GIB - used_by_others - 16 * GIB - sum(freed_memory)
        return free, 80 * GIB

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed_memory.clear())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: weights + sum(freed_memory))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    config = EngineConfig("somewhere", gpu_memory_utilization=0.5)
    assert memory_plan.kv_cache_budget(config, torch.device("cuda"), step_bytes=GIB) == expected

    config.lora_adapters["name"] = "/folder"
    with_adapters = memory_plan.kv_cache_budget(config, torch.device("cuda"), step_bytes=GIB)
    assert with_adapters == expected - config.lora_memory


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cached"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_cached_pages_of_files_are_free_memory_of_a_container(
    folder, limit, used, cached, tmp_path
):
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / limit).write_text("500000\n")
    (group / used).write_text("400000\n")
    (group / "memory.stat").write_text(f"anon 100000\n{cached} 250000\n")
    assert main_memory.available_memory(tmp_path) == 500_000 - 400_000 + 250_000
    (group / limit).write_text("max\n")
    assert main_memory.available_memory(tmp_path) > 500_000
