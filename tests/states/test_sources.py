"""How captures of vLLM and SGLang become samples: their answers, their files, and what is wrong with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from changeover.machine.errors import InvalidInput
from changeover.machine.simulated_world import SimulatedClock
from changeover.states.captures import CaptureInvalid
from changeover.states.final_norm import FinalNorm, read_final_norm
from changeover.states.params import CollectParams
from changeover.states.sources import FILE_WAIT_S, SglangSource, VllmSource, capture_source, wait_for_file
from changeover.states.staging import Staging, capture_name
from changeover.states.tensors import TensorFile, TensorFileInvalid, to_bf16_bits
from tests.states.fake_server import write_safetensors

H, BOUNDARIES = 4, (2, 4, 5)
NORM = FinalNorm(np.array([1.0, 2.0, 0.5, 1.0], np.float32), eps=1e-5)


def vllm_body(prompt: list[int], output: list[int], **usage: int) -> dict[str, Any]:
    used = {"prompt_tokens": len(prompt), "completion_tokens": len(output), **usage}
    choice = {"message": {"content": "hello"}, "finish_reason": "length", "token_ids": output}
    return {"prompt_token_ids": prompt, "choices": [choice], "usage": used}


def sglang_body(prompt: list[int], output: list[int]) -> dict[str, Any]:
    body = vllm_body(prompt, output)
    body["choices"][0] |= {"prompt_token_ids": body.pop("prompt_token_ids"), "response_token_ids": output}
    return body


def write_vllm(
    path: Path, rows: int = 4, layers: int = 4, dtype: str = "F32", fill: float | None = None
) -> np.ndarray:
    states = np.random.default_rng(3).standard_normal((rows, layers, H)).astype(np.float32)
    states = states if fill is None else np.full_like(states, fill)
    kept = {"F32": states, "F16": states.astype(np.float16), "BF16": to_bf16_bits(states)}[dtype]
    ids = np.array([5, 6, 7, 8][:rows], np.int64)
    write_safetensors(path, {"hidden_states": (dtype, kept), "token_ids": ("I64", ids)})
    return states


def test_vllm_gives_the_last_layers_output_and_we_apply_the_norm(tmp_path: Path) -> None:
    source = VllmSource(BOUNDARIES, NORM, SimulatedClock())
    assert source.request_fields("x.safetensors") == {
        "kv_transfer_params": {"changeover_name": "x.safetensors", "include_output_tokens": True},
        "return_token_ids": True,
    }
    answer = source.answer(vllm_body([5, 6, 7], [8, 9]), "x.safetensors")
    assert (answer.rows, answer.boundaries, answer.last_norm, answer.path) == (
        4,
        BOUNDARIES,
        "post",
        "x.safetensors",
    )
    states = write_vllm(tmp_path / "x")
    captured = source.read(tmp_path / "x", answer)
    assert captured.input_ids.tolist() == [5, 6, 7, 8]
    assert (captured.aux == to_bf16_bits(states[:, :3])).all()
    torch = pytest.importorskip("torch")
    last = torch.from_numpy(states[:, 3])
    wanted = torch.nn.functional.rms_norm(last, (H,), torch.from_numpy(NORM.weight), NORM.eps)
    wanted = wanted.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.abs(captured.last.astype(int) - wanted.astype(int)).max() <= 1  # a rounding of the last bit


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_read_too(tmp_path: Path, dtype: str) -> None:
    source = VllmSource(BOUNDARIES, NORM, SimulatedClock())
    answer = source.answer(vllm_body([5, 6, 7], [8, 9]), "x")
    states = write_vllm(tmp_path / "x", dtype=dtype)
    aux = (source.read(tmp_path / "x", answer).aux.astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(aux, states[:, :3], rtol=1e-2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "not an object"),
        ({"choices": []}, "IndexError"),
        (vllm_body([5, 6, 7], [8, 9], completion_tokens=3), "usage says 3 \\+ 3 tokens, the ids are 3 \\+ 2"),
        ({**vllm_body([5], [8]), "prompt_token_ids": None}, "TypeError"),
    ],
)
def test_an_answer_that_is_not_whole_is_invalid(body: Any, words: str) -> None:
    with pytest.raises(CaptureInvalid, match=words):
        VllmSource(BOUNDARIES, NORM, SimulatedClock()).answer(body, "x")


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"layers": 3}, "expected \\[tokens, 4, hidden\\]"), ({"fill": float("nan")}, "NaN or infinity")],
)
def test_a_file_that_is_not_as_it_must_be_is_invalid(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    source = VllmSource(BOUNDARIES, NORM, SimulatedClock())
    write_vllm(tmp_path / "x", **facts)
    with pytest.raises(CaptureInvalid, match=words):
        source.read(tmp_path / "x", source.answer(vllm_body([5, 6, 7], [8, 9]), "x"))


def test_a_server_that_answers_and_never_writes_is_found_out(tmp_path: Path) -> None:
    """vLLM's stock connector on a CPU: 200, a path, and no file for ever."""
    clock = SimulatedClock()
    started_s = clock.monotonic()
    with pytest.raises(CaptureInvalid, match="no file x is there: it captures nothing"):
        wait_for_file(tmp_path / "x", clock)
    assert FILE_WAIT_S <= clock.monotonic() - started_s < FILE_WAIT_S + 1.0


def test_sglang_is_asked_a_second_time_with_the_ids_that_were_announced(tmp_path: Path) -> None:
    source = SglangSource(BOUNDARIES, SimulatedClock())
    body = sglang_body([5, 6, 7], [8, 9])
    path = tmp_path / capture_name("a")
    where, then = source.second_request(body, path)
    assert where == "/generate" and then["input_ids"] == [5, 6, 7, 8]
    sha256 = hashlib.sha256(np.array([5, 6, 7, 8], np.int64).tobytes()).hexdigest()
    assert (tmp_path / f"want-{sha256}").read_text() == path.name
    (tmp_path / "want-other").write_text("somebody-elses.safetensors")
    assert Staging(tmp_path, ["a"]).files() == [tmp_path / f"want-{sha256}"]
    states = np.random.default_rng(3).standard_normal((4, 4, H)).astype(np.float32)
    ids = np.array([5, 6, 7, 8], np.int64)
    write_safetensors(
        path, {"aux": ("F32", states[:, :3]), "last": ("F32", states[:, 3]), "token_ids": ("I64", ids)}
    )
    captured = source.read(path, source.answer(body, path.name))
    assert (captured.last == to_bf16_bits(states[:, 3])).all(), "it is after the norm already"
    assert not (tmp_path / f"want-{sha256}").exists()


def test_bf16_is_rounded_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * 1e3
    values = np.concatenate([values, np.float32([0.0, -0.0, 1.00390625, 1.01171875, 3.3e38])])
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (to_bf16_bits(values) == wanted).all()


def write_target(folder: Path, model_type: str = "llama", name: str = "model.norm.weight") -> Path:
    folder.mkdir()
    text = {"model_type": model_type, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    weight = to_bf16_bits(np.ones(H, np.float32))
    write_safetensors(folder / "model.safetensors", {name: ("BF16", weight)})
    return folder


def test_the_final_norm_is_read_from_the_target(tmp_path: Path) -> None:
    norm = read_final_norm(write_target(tmp_path / "m", name="language_model.model.norm.weight"))
    assert norm.weight.tolist() == [1.0] * H and norm.eps == 1e-5


@pytest.mark.parametrize("facts", [{"model_type": "gemma3"}, {"name": "model.layers.0.norm.weight"}])
def test_a_target_whose_final_norm_is_not_known_is_refused(tmp_path: Path, facts: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        read_final_norm(write_target(tmp_path / "m", **facts))


def test_an_engine_that_captures_nothing_is_refused(tmp_path: Path) -> None:
    params = CollectParams(
        url="http://x",
        prompts=tmp_path,
        out=tmp_path,
        capture_dir=tmp_path,
        model_path=write_target(tmp_path / "m"),
        hidden=H,
        layers=8,
        vocab=10,
        boundaries=BOUNDARIES,
        engine_kind="mystery",
    )
    with pytest.raises(InvalidInput, match="embedded, sglang or vllm"):
        capture_source(params, SimulatedClock())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (3).to_bytes(8, "little") + b"{x}",
        (200).to_bytes(8, "little") + b"{}",
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(TensorFileInvalid):
        TensorFile(tmp_path / "x")


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "F8_E4M3"},
        {"shape": [3]},
        {"shape": [-1, -2]},
        {"data_offsets": [0, 4000]},
        {"data_offsets": [-8, 0]},
        {"shape": "x"},
    ],
)
def test_a_tensor_that_does_not_lie_in_its_file_is_not_read(tmp_path: Path, facts: dict[str, Any]) -> None:
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **facts}
    text = json.dumps({"a": whole}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(TensorFileInvalid):
        TensorFile(tmp_path / "x").read("a")
