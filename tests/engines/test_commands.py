"""Command lines of the engines, and the settings that cannot work together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from changeover.engines.embedded.config import parse_arguments
from changeover.engines.protocol import SIDE, LaunchSpec
from changeover.engines.registry import get_engine
from changeover.machine.errors import InvalidInput
from changeover.teardown.drains import read_gauge
from changeover.teardown.footprint import Drain

BASE = LaunchSpec(profile="production", model_path=Path("/models/m"), port=30000, python="/env/bin/python")
CAPTURE = replace(
    BASE,
    profile="capture",
    capture_dir=Path("/captures"),
    aux_boundaries=(2, 15, 27),
    layers=30,
)
SPECULATIVE = replace(BASE, profile="speculative", drafter=Path("/drafter"), draft_tokens=3)


def argv(kind: str, launch: LaunchSpec) -> list[str]:
    assert get_engine(kind).refusals(launch) == []
    return list(get_engine(kind).server_command(launch).argv)


def after(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1, f"{flag} in {arguments}"
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize("launch", [BASE, CAPTURE, SPECULATIVE], ids=lambda launch: launch.profile)
def test_the_embedded_servers_command_line_is_one_that_it_parses(launch: LaunchSpec) -> None:
    launch = replace(
        launch, served_name="name", context_length=512, max_concurrency=3, flags=("--threads", "1")
    )
    arguments = argv("embedded", launch)
    assert arguments[:3] == ["/env/bin/python", "-m", "changeover.engines.embedded"]
    config = parse_arguments(arguments[3:])
    assert (config.port, config.served_name, config.host) == (30000, "name", "127.0.0.1")
    assert (config.max_model_len, config.max_concurrency, config.threads) == (512, 3, 1)
    assert config.capture_dir == launch.capture_dir
    assert config.aux_boundaries == launch.aux_boundaries
    assert config.drafter == launch.drafter


@pytest.mark.parametrize(
    "extra",
    [
        ["--drafter", "/d", "--capture-dir", "/c"],
        ["--aux-boundaries", "1,2,3"],
        ["--aux-boundaries", "a,b", "--capture-dir", "/c"],
        ["--draft-tokens", "0"],
        ["--max-concurrency", "0"],
        ["--nonsense"],
    ],
)
def test_the_embedded_server_refuses_what_it_would_misunderstand(
    extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(["--model", "/m", "--port", "1", *extra])
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_sglang_captures_without_cache_graphs_or_chunks() -> None:
    arguments = argv("sglang", CAPTURE)
    assert "--disable-radix-cache" in arguments and "--disable-cuda-graph" in arguments
    assert after(arguments, "--chunked-prefill-size") == "-1"


def test_sglang_captures_by_a_hook_on_what_every_model_calls() -> None:
    arguments = argv("sglang", CAPTURE)
    [hook] = json.loads(after(arguments, "--forward-hooks"))
    assert hook["target_modules"] == ["*logits_processor"]
    assert hook["config"] == {"folder": "/captures", "boundaries": [2, 15, 27]}
    command = get_engine("sglang").server_command(CAPTURE)
    module, function = hook["hook_factory"].split(":")
    source = Path(command.env["PYTHONPATH"].split(":")[0]) / f"{module}.py"
    assert f"def {function}(" in source.read_text()


def test_sglang_captures_through_the_patch_where_it_is_told_to() -> None:
    launch = replace(CAPTURE, overlay=Path("/overlay"))
    assert "--forward-hooks" not in argv("sglang", launch)
    command = get_engine("sglang").server_command(launch)
    assert command.env["PYTHONPATH"].split(":")[:2] == ["/overlay", str(SIDE)]
    assert json.loads(command.env["CHANGEOVER_CAPTURE"]) == {"folder": "/captures", "boundaries": [2, 15, 27]}


@pytest.mark.parametrize("kind", ["vllm", "embedded"])
def test_the_patch_is_of_sglangs_source_alone(kind: str) -> None:
    [refusal] = get_engine(kind).refusals(replace(CAPTURE, overlay=Path("/overlay")))
    assert "capture_through: expected hook; saw patch" in refusal


def test_what_the_patch_is_told_is_not_the_users_to_set() -> None:
    [refusal] = get_engine("sglang").refusals(replace(CAPTURE, env={"CHANGEOVER_CAPTURE": "{}"}))
    assert "remove it from env" in refusal


def test_sglang_drafts_a_tree_where_it_is_asked_to() -> None:
    arguments = argv("sglang", replace(SPECULATIVE, draft_top_k=4, verify_tokens=16))
    assert after(arguments, "--speculative-num-steps") == "3"
    assert after(arguments, "--speculative-eagle-topk") == "4"
    assert after(arguments, "--speculative-num-draft-tokens") == "16"
    [refusal] = get_engine("sglang").refusals(replace(SPECULATIVE, draft_top_k=4, verify_tokens=38))
    assert "verify_tokens: expected at most 37" in refusal


def test_settings_of_one_engine_are_refused_by_the_others() -> None:
    tuned = replace(BASE, attention_backend="triton", continuous_decode_steps=4)
    assert after(argv("sglang", tuned), "--attention-backend") == "triton"
    assert after(argv("sglang", tuned), "--num-continuous-decode-steps") == "4"
    assert (
        after(argv("vllm", replace(tuned, continuous_decode_steps=None)), "--attention-backend") == "triton"
    )
    assert [one.partition(":")[0] for one in get_engine("vllm").refusals(tuned)] == [
        "continuous_decode_steps"
    ]
    refused = get_engine("embedded").refusals(tuned)
    assert [one.partition(":")[0] for one in refused] == ["attention_backend", "continuous_decode_steps"]
    for kind in ("vllm", "embedded"):
        [refusal] = get_engine(kind).refusals(replace(SPECULATIVE, draft_top_k=2, verify_tokens=4))
        assert refusal.startswith("draft_top_k: expected 1")


def test_sglang_speculates_with_eagle3_never_eagle() -> None:
    arguments = argv("sglang", SPECULATIVE)
    assert after(arguments, "--speculative-algorithm") == "EAGLE3"
    assert after(arguments, "--speculative-draft-model-path") == "/drafter"
    assert (
        after(arguments, "--speculative-num-steps"),
        after(arguments, "--speculative-num-draft-tokens"),
    ) == ("3", "4")


@pytest.mark.parametrize("flags", [("--speculative-algorithm", "EAGLE"), ("--speculative-algorithm=EAGLE",)])
def test_sglang_21272_eagle_with_an_eagle3_drafter_is_refused(flags: tuple[str, ...]) -> None:
    [refusal] = get_engine("sglang").refusals(replace(SPECULATIVE, flags=flags))
    assert "expected EAGLE3; saw EAGLE" in refusal


def test_sglang_names_every_port_and_keeps_its_environment_readable() -> None:
    command = get_engine("sglang").server_command(replace(BASE, env={"NCCL_PROTO": "LL"}))
    assert command.ports == (30000, 31000)
    assert after(list(command.argv), "--nccl-port") == "31000"
    assert command.env["SPT_NOENV"] == "1" and command.env["NCCL_PROTO"] == "LL"
    assert get_engine("sglang").refusals(replace(BASE, port=65000)) != []


def test_vllm_gives_its_workers_time_to_free_their_memory() -> None:
    command = get_engine("vllm").server_command(BASE)
    assert float(after(list(command.argv), "--shutdown-timeout")) > 0
    assert float(command.env["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]) > 0


def test_vllm_names_layers_as_boundaries() -> None:
    config = json.loads(after(argv("vllm", CAPTURE), "--speculative-config"))
    ids = config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [2, 15, 27, 30], "and the last layer's output, of which the norm is applied later"
    connector = json.loads(after(argv("vllm", CAPTURE), "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"]["shared_storage_path"] == "/captures"
    command = get_engine("vllm").server_command(CAPTURE)
    source = Path(command.env["PYTHONPATH"].split(":")[0]) / f"{connector['kv_connector_module_path']}.py"
    assert f"class {connector['kv_connector']}(" in source.read_text()


def test_vllm_speculates() -> None:
    config = json.loads(after(argv("vllm", SPECULATIVE), "--speculative-config"))
    assert config == {"method": "eagle3", "model": "/drafter", "num_speculative_tokens": 3}


def test_flags_are_passed_as_they_are_and_last() -> None:
    for kind in ("embedded", "sglang", "vllm"):
        launch = replace(BASE, flags=("--a flag", "$(touch /tmp/x)"))
        assert get_engine(kind).server_command(launch).argv[-2:] == launch.flags


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("embedded", {"tensor_parallel": 2}, "tensor_parallel"),
        ("embedded", {"memory_fraction": 0.5}, "memory_fraction"),
        ("embedded", {"profile": "capture"}, "captured states"),
        ("embedded", {"profile": "speculative"}, "drafter"),
        ("sglang", {"profile": "speculative"}, "drafter"),
        ("sglang", {"profile": "capture", "flags": ("--cuda-graph-max-bs", "8")}, "CUDA graphs"),
        ("sglang", {"profile": "capture", "flags": ("--speculative-algorithm", "EAGLE3")}, "target alone"),
        ("vllm", {"profile": "speculative"}, "drafter"),
        ("vllm", {"profile": "capture", "capture_dir": Path("/c"), "layers": 30}, "aux_boundaries"),
        ("vllm", {"profile": "capture", "aux_boundaries": (2, 30), "layers": 30}, "always captured"),
        ("vllm", {"profile": "capture", "env": {"PYTHONPATH": "/x"}}, "PYTHONPATH"),
        ("vllm", {"profile": "capture", "flags": ("--enable_prefix_caching",)}, "cached prefix"),
        ("vllm", {"profile": "capture", "flags": ("--enable-chunked-prefill",)}, "39949"),
        ("vllm", {"profile": "capture", "flags": ("--kv-transfer-config={}",)}, "replace it"),
        ("sglang", {"profile": "capture", "flags": ("--chunked-prefill-size=4096",)}, "in chunks"),
        ("sglang", {"profile": "capture", "flags": ("--forward-hooks", "[]")}, "replace it"),
        ("sglang", {"profile": "capture", "flags": ("--cuda-graph-bs=1",)}, "CUDA graphs"),
        ("sglang", {"profile": "capture", "env": {"PYTHONPATH": "/x"}}, "PYTHONPATH"),
        ("sglang", {"profile": "capture"}, "expected a folder and aux_boundaries"),
        ("vllm", {"profile": "capture", "flags": ("--speculative-config={}",)}, "--speculative-config"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(kind: str, change: dict[str, Any], said: str) -> None:
    assert any(said in refusal for refusal in get_engine(kind).refusals(replace(BASE, **change)))


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="embedded, sglang, vllm"):
        get_engine("tgi")


def test_a_drain_is_what_teardown_asks_for() -> None:
    drain: Drain = get_engine("sglang").drain(get_engine("sglang").server_command(BASE))
    drain.begin()  # nothing to post: the senders have been stopped
    with pytest.raises(ConnectionRefusedError):  # nobody listens there; a teardown notes it and goes on
        drain.running()


def test_gauges_are_read_from_prometheus_text() -> None:
    text = '# HELP a:b x\n# TYPE a:b gauge\na:b{m="1",r="0"} 2.0\na:b{m="1",r="1"} 3\na:bc 7\nd 1e3\n'
    assert read_gauge(text, "a:b") == 5.0
    assert read_gauge(text, "d") == 1000.0
    assert read_gauge(text, "missing") is None
