"""Tests of the names and labels of metrics with the setting `NEREID_METRICS_NAMES=vllm`."""

from nereid_client.vllm_metric_names import with_vllm_names


def test_metrics_get_the_names_and_labels_of_vllm():
    page = 'nereid:num_requests_running{model_name="llm"} 1\nnereid:num_requests 2\n'
    renamed = 'vllm:num_requests_running{model_name="chat",engine="0"} 1\nnereid:num_requests 2\n'
    assert with_vllm_names(page, {"llm": "chat"}) == renamed


def test_the_number_of_an_engine_process_stays_in_its_label():
    page = 'nereid:num_requests_running{engine="1",model_name="llm"} 3'
    renamed = 'vllm:num_requests_running{engine="1",model_name="chat"} 3'
    assert with_vllm_names(page, {"llm": "chat"}) == renamed


def test_each_of_several_models_gets_its_name_and_the_label_of_its_engine():
    names = {"llm": "chat", "org-chat": 'org/"chat"'}
    page = 'nereid:prompt_tokens_total{model_name="org-chat"} 3\n'
    renamed = 'vllm:prompt_tokens_total{model_name="org/\\"chat\\"",engine="0"} 3\n'
    assert with_vllm_names(page, names) == renamed


def test_the_name_of_a_model_is_escaped():
    page = with_vllm_names('nereid:num_requests_running{model_name="llm"} 1\n', {"llm": 'a"\\\nb'})
    assert page == 'vllm:num_requests_running{model_name="a\\"\\\\\\nb",engine="0"} 1\n'
