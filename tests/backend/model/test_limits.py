import torch
from nereid_backend.config import EngineConfig
from nereid_backend.model import limits

GIB = 2**30


def test_what_loading_freed_counts_as_free_on_a_gpu(monkeypatch):
    kept_by_torch = [9 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept_by_torch.clear())
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (64 * GIB - sum(kept_by_torch), 80 * GIB)
    )
    config = EngineConfig("somewhere", gpu_memory_utilization=0.5)
    found = limits.kv_cache_budget(config, torch.device("cuda"), activations=GIB)
    assert found == 40 * GIB - 16 * GIB - GIB
