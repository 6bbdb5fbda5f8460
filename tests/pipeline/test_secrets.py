import pytest

from changeover.machine.errors import InvalidInput
from changeover.pipeline.follow import log_tail
from changeover.pipeline.load import check_pipeline
from changeover.pipeline.secrets import looks_secret, secret_in_arguments
from tests.pipeline.test_load import changed

TOKEN = "hf_" + "a1B2c3D4e5F6g7H8"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", TOKEN),
        ("ANYTHING", TOKEN),
        ("OPENAI_API_KEY", "sk-abcdefghijklmnopqrst"),
        ("--api-key", "correcthorsebattery"),
        ("DB_PASSWORD", "correcthorsebattery"),
        ("X", "ghp_0123456789abcdefghij"),
    ],
)
def test_what_looks_like_a_secret(name, value):
    assert looks_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_PROTO", "LL"),
        ("--max-total-tokens", "4096"),
        ("--num-continuous-decode-steps", "4"),
        ("SSH_KEY", "/home/me/.ssh/id_ed25519"),
        ("--speculative-num-draft-tokens", "4"),
        ("VLLM_CACHE_KEY", "v1"),
        ("--model-path", "/models/token-model"),
    ],
)
def test_engine_knobs_are_no_secrets(name, value):
    """NVIDIA/Model-Optimizer#2119: masking by the word "token" hid twelve knobs."""
    assert not looks_secret(name, value)


def test_a_flag_is_read_with_its_value_in_both_spellings():
    assert secret_in_arguments(["--api-key", "correcthorsebattery"]) == "--api-key"
    assert secret_in_arguments(["--api-key=correcthorsebattery"]) == "--api-key"
    assert secret_in_arguments(["--port", "8000", "--api-key-file", "/run/key"]) is None


@pytest.mark.parametrize(
    "override",
    [
        f"engine.env.HF_TOKEN={TOKEN}",
        f"engine.flags=['--api-key','{TOKEN}']",
        f"phases.baseline.server.env.X={TOKEN}",
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(override):
    with pytest.raises(InvalidInput) as caught:
        check_pipeline(changed(override), source="test")
    assert "looks like a secret" in caught.value.seen
    assert TOKEN not in str(caught.value)


def test_the_end_of_a_log_is_kept_without_what_it_tells_of_the_environment(tmp_path):
    """A job that fails after `env` would put the run's cookie, and the user's token, into journal and report."""
    (tmp_path / "log").write_text(
        f"CHANGEOVER_COOKIE=0123456789abcdef\nHF_TOKEN={TOKEN}\nusing {TOKEN}\nmax_tokens=4096 loss=0.1\n"
    )
    assert log_tail(tmp_path / "log").splitlines() == [
        "CHANGEOVER_COOKIE=***",
        "HF_TOKEN=***",
        "using ***",
        "max_tokens=4096 loss=0.1",
    ]
